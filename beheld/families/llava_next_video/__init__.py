"""LLaVA-NeXT-Video: LLaVA-NeXT with videos."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("llava_next_video",),
    tested=(
        KnownCheckpoint(
            "llava_next_video",
            "LlavaNextVideoForConditionalGeneration",
            "llava-hf/LLaVA-NeXT-Video-7B-hf",
            IMAGE_AND_VIDEO,
            "pooled frames",
        ),
    ),
)
