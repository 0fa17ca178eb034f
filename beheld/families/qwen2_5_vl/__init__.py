"""Qwen2.5-VL: a tower with windows."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("qwen2_5_vl",),
    tested=(
        KnownCheckpoint(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen/Qwen2.5-VL-3B-Instruct",
            IMAGE_AND_VIDEO,
            "three-axis positions",
            on_gpu=True,
        ),
    ),
    calls=("hermes",),
    reasoning=("think",),
)
