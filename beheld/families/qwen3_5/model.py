"""Qwen3.5: mixers with the gated delta rule, and Qwen3-VL's tower without its deeper features."""

from __future__ import annotations

from beheld.families._shared.gated_delta.mixer import replace_mixers
from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(
    adapt=replace_mixers,
    plain_head=True,
    packed=PackedTower(learned=""),
    packs_attention=True,
    positions_by_kind=True,
    unused_weights=("mtp.",),
)
