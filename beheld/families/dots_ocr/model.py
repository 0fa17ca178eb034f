"""dots.ocr's model as the engine runs it: its tower packs images."""

from __future__ import annotations

from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(packed=PackedTower(), packs_attention=True, towers={"image": ("vision_tower",)})
