"""North Micro Vision: Qwen3-VL's tower before Command's layers, of which the full ones have no positions."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("cohere_compass",),
    tested=(
        KnownCheckpoint(
            "cohere_compass",
            "CohereCompassForConditionalGeneration",
            "CohereLabs/North-Micro-Vision-Instruct",
            IMAGE_AND_VIDEO,
            "three-axis positions; the tower also enters the first layers; sliding and full layers",
            by_census=True,
        ),
    ),
)
