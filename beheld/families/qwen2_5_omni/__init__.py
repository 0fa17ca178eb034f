"""Qwen2.5-Omni: images, videos and audio; answers in text."""

from __future__ import annotations

from beheld.families.family import ALL, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
    tested=(
        KnownCheckpoint(
            "qwen2_5_omni",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            "Qwen/Qwen2.5-Omni-7B",
            ALL,
            "three-axis positions; answers in text; `use_audio_in_video` reads a video with its audio",
        ),
    ),
    reads_by="Qwen2_5OmniThinkerForConditionalGeneration",
    reference=ReferenceOptions(wants_frame_rate=True),
    calls=("hermes",),
)
