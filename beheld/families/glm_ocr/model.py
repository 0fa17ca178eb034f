"""GLM-OCR: its tower packs images and takes patch positions."""

from __future__ import annotations

from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(packed=PackedTower(), packs_attention=True, positions_by_kind=True)
