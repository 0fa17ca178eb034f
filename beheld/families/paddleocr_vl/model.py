"""PaddleOCR-VL: its tower packs images and merges patches only after its layers."""

from __future__ import annotations

from beheld.families.model import FamilyModel, PackedTower

MODEL = FamilyModel(
    packed=PackedTower(learned="vision_model.embeddings", merge=1),
    packs_attention=True,
    positions_by_kind=True,
    towers={"image": ("model.visual", "model.projector")},
)
