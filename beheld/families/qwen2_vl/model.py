"""Qwen2-VL: its tower packs images."""

from __future__ import annotations

from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(packed=PackedTower(), packs_attention=True, positions_by_kind=True)
