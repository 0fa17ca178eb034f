"""GLM-OCR: its tower packs images, and takes the positions of their patches."""

from __future__ import annotations

from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(packed=PackedTower(), packs_attention=True, positions_by_kind=True)
