"""Qwen2.5-VL: a tower with windows."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("qwen2_5_vl",),
    short_names=(
        ShortName(
            "qwen2.5-vl-3b",
            "Qwen/Qwen2.5-VL-3B-Instruct",
            "qwen2_5_vl",
            "Qwen Research License",
            3.8,
            "documents, charts, videos, coordinates",
        ),
        ShortName(
            "qwen2.5-vl-7b",
            "Qwen/Qwen2.5-VL-7B-Instruct",
            "qwen2_5_vl",
            "Apache-2.0",
            8.3,
            "documents, charts, videos, coordinates",
        ),
        ShortName(
            "qwen2.5-vl-32b",
            "Qwen/Qwen2.5-VL-32B-Instruct",
            "qwen2_5_vl",
            "Apache-2.0",
            33.5,
            "documents, charts, videos, mathematics",
        ),
    ),
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
    grounding=Grounding("json", 0),
)
