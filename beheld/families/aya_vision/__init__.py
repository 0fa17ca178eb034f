"""Aya Vision: images in tiles."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("aya_vision",),
    tested=(
        KnownCheckpoint(
            "aya_vision",
            "AyaVisionForConditionalGeneration",
            "CohereForAI/aya-vision-8b",
            IMAGE,
            "tiles; sliding and full layers",
        ),
    ),
)
