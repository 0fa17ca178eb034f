"""VideoLLaMA 3: images and frames at their own size before Qwen2."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("video_llama_3", ),
    tested=(
        KnownCheckpoint(
            "video_llama_3",
            "VideoLlama3ForConditionalGeneration",
            "lkhl/VideoLLaMA3-2B-Image-HF",
            IMAGE_AND_VIDEO,
            "images at their native size",
            by_census=True,
        ),
    ),
)
