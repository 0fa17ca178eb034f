"""VideoLLaMA 3: images and frames at their own size before Qwen2."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("video_llama_3",),
    tested=(
        KnownCheckpoint(
            "video_llama_3",
            "VideoLlama3ForConditionalGeneration",
            "lkhl/VideoLLaMA3-2B-Image-HF",
            IMAGE,
            "images at their native size; no videos, whose alike patches its processor drops",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"image": config.image_token_id},
)
