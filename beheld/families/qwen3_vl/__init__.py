"""Qwen3-VL: a tower whose features also enter the first text layers."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    short_names=(
        ShortName(
            "qwen3-vl-2b",
            "Qwen/Qwen3-VL-2B-Instruct",
            "qwen3_vl",
            "Apache-2.0",
            2.1,
            "images, documents and videos on a small machine",
        ),
        ShortName(
            "qwen3-vl-4b",
            "Qwen/Qwen3-VL-4B-Instruct",
            "qwen3_vl",
            "Apache-2.0",
            4.4,
            "documents, videos, coordinates, tools",
        ),
        ShortName(
            "qwen3-vl-8b",
            "Qwen/Qwen3-VL-8B-Instruct",
            "qwen3_vl",
            "Apache-2.0",
            8.8,
            "documents, videos, coordinates, tools",
        ),
        ShortName(
            "qwen3-vl-30b-a3b",
            "Qwen/Qwen3-VL-30B-A3B-Instruct",
            "qwen3_vl_moe",
            "Apache-2.0",
            31.1,
            "as qwen3-vl-8b; experts, so it answers fast",
        ),
    ),
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
)
