"""Audio Flamingo 3: Whisper's encoder in windows before Qwen2."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("audioflamingo3",),
    tested=(
        KnownCheckpoint(
            "audioflamingo3",
            "AudioFlamingo3ForConditionalGeneration",
            "nvidia/audio-flamingo-3-hf",
            AUDIO,
            "windows of 30 s; reads the first 600 s of an audio",
        ),
    ),
)
