"""Qwen2-VL: three-axis positions."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("qwen2_vl",),
    short_names=(
        ShortName(
            "qwen2-vl-2b", "Qwen/Qwen2-VL-2B-Instruct", "qwen2_vl", "Apache-2.0", 2.2, "images and videos, documents"
        ),
    ),
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
    grounding=Grounding("object_ref box", 1000),
)
