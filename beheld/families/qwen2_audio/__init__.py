"""Qwen2-Audio: audio before a language model."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("qwen2_audio",),
    tested=(
        KnownCheckpoint(
            "qwen2_audio",
            "Qwen2AudioForConditionalGeneration",
            "Qwen/Qwen2-Audio-7B-Instruct",
            AUDIO,
            "reads the first 30 s of an audio",
            on_gpu=True,
        ),
    ),
)
