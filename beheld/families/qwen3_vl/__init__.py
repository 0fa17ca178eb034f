"""Qwen3-VL: a tower whose features also enter the first text layers."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    tested=(
        KnownCheckpoint(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            "Qwen/Qwen3-VL-4B-Instruct",
            IMAGE_AND_VIDEO,
            "three-axis positions; the tower also enters the first layers",
            on_gpu=True,
        ),
        KnownCheckpoint(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen/Qwen3-VL-30B-A3B-Instruct",
            IMAGE_AND_VIDEO,
            "as Qwen3-VL; experts",
        ),
    ),
    calls=("hermes",),
    reasoning=("think",),
)
