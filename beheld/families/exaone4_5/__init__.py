"""EXAONE 4.5: Qwen2.5-VL's kind of tower before EXAONE 4."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("exaone4_5",),
    tested=(
        KnownCheckpoint(
            "exaone4_5",
            "Exaone4_5_ForConditionalGeneration",
            "LGAI-EXAONE/EXAONE-4.5-33B",
            IMAGE_AND_VIDEO,
            "sliding and full layers",
            by_census=True,
        ),
    ),
    calls=("hermes",),
    reasoning=("think",),
)
