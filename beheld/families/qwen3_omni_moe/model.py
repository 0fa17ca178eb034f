"""Qwen3-Omni: like Qwen2.5-Omni, with a tower whose features also enter the first layers, and fractional positions."""

from __future__ import annotations

from beheld.families._shared import deepstack
from beheld.families.model import FamilyModel
from beheld.families.qwen2_5_omni.model import SPEECH, parts

MODEL = FamilyModel(
    parts=parts,
    extra_columns=deepstack.Deepstack,
    plain_head=True,
    packs_attention=True,
    # Positions of frames, and of everything after them, have float32 fractions. In these units they are integers; only
    # positions below one half may need finer ones.
    position_unit=1 << 24,
    unused_weights=SPEECH,
)
