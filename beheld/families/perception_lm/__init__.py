"""Perception LM: Perception Encoder with tiles before Llama."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("perception_lm",),
    tested=(
        KnownCheckpoint(
            "perception_lm",
            "PerceptionLMForConditionalGeneration",
            "facebook/Perception-LM-1B",
            IMAGE_AND_VIDEO,
            "tiles; its tower needs the package timm",
            by_census=True,
        ),
    ),
    package="timm",
)
