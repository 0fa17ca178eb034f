"""LFM3-VL: LFM3 with a tower of convolutions and attention."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("lfm3_vl",),
    tested=(
        KnownCheckpoint(
            "lfm3_vl",
            "Lfm3VlForConditionalGeneration",
            "LiquidAI/LFM3-VL-2B",
            IMAGE_AND_VIDEO,
            "short convolutions, sliding and full layers; frames with their times",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.23", UNDEFINED),
    calls=("lfm2",),
    reasoning=("think",),
)
