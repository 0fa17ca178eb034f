"""Qwen2.5-VL: its tower packs images, and also attends within windows."""

from __future__ import annotations

from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(packed=PackedTower(windows=True), packs_attention=True, positions_by_kind=True)
