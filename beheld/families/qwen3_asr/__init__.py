"""Qwen3-ASR: an audio encoder before Qwen3, which writes the language and then the words."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("qwen3_asr",),
    tested=(
        KnownCheckpoint(
            "qwen3_asr",
            "Qwen3ASRForConditionalGeneration",
            "Qwen/Qwen3-ASR-1.7B-hf",
            AUDIO,
            "in transformers' layout; the forced aligner is not run",
        ),
    ),
)
