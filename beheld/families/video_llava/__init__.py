"""Video-LLaVA: one tower for images and one for frames, before Llama."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("video_llava",),
    tested=(
        KnownCheckpoint(
            "video_llava",
            "VideoLlavaForConditionalGeneration",
            "LanguageBind/Video-LLaVA-7B-hf",
            IMAGE_AND_VIDEO,
            "eight frames of a video",
            by_census=True,
        ),
    ),
)
