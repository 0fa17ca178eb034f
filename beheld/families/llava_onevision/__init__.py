"""LLaVA-OneVision: a lone image is cut into tiles; videos."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("llava_onevision",),
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
