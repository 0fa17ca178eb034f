"""Qwen3-VL: its tower's features also enter the first layers of the text model."""

from __future__ import annotations

from beheld.families._shared import deepstack
from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(
    extra_columns=deepstack.Deepstack,
    plain_head=True,
    packed=PackedTower(learned=""),
    packs_attention=True,
    positions_by_kind=True,
)
