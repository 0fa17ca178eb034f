"""LLaVA-OneVision: a lone image is cut into tiles; videos."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("llava_onevision",),
    short_names=(
        ShortName(
            "llava-onevision-0.5b",
            "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
            "llava_onevision",
            "Apache-2.0",
            0.9,
            "images and videos on a laptop",
        ),
    ),
    tested=(
        KnownCheckpoint(
            "llava_onevision",
            "LlavaOnevisionForConditionalGeneration",
            "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
            IMAGE_AND_VIDEO,
            "tiles for a lone image",
            on_gpu=True,
        ),
    ),
)
