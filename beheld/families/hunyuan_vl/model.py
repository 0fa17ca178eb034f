"""HunyuanOCR: its tower packs images and takes no positions."""

from __future__ import annotations

from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(packed=PackedTower(positions=False), packs_attention=True)
