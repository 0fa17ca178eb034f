"""Qwen2-VL: three-axis positions."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("qwen2_vl",),
    tested=(
        KnownCheckpoint(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            "Qwen/Qwen2-VL-7B-Instruct",
            IMAGE_AND_VIDEO,
            "three-axis positions",
        ),
    ),
    calls=("hermes",),
)
