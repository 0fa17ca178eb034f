"""Qwen3-Omni: as Qwen2.5-Omni, with a tower that also enters the first layers, and fractions of positions."""

from __future__ import annotations

from beheld.families._shared import deepstack
from beheld.families.model import FamilyModel
from beheld.families.qwen2_5_omni.model import SPEECH

MODEL = FamilyModel(
    extra_columns=deepstack.Deepstack,
    plain_head=True,
    packs_attention=True,
    # Positions of frames, and of everything after them, have fractions in float32. In these parts, which only a number
    # below one half may be too fine for, they are whole numbers.
    position_unit=1 << 24,
    unused_weights=SPEECH,
)
