"""Command A Vision: images in tiles."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("cohere2_vision",),
    tested=(
        KnownCheckpoint(
            "cohere2_vision",
            "Cohere2VisionForConditionalGeneration",
            "CohereLabs/command-a-vision-07-2025",
            IMAGE,
            "tiles; sliding and full layers",
        ),
    ),
    calls=("cohere",),
    reasoning=("cohere",),
)
