"""Music Flamingo: Audio Flamingo 3's encoder, whose states are rotated by their time, before Qwen2."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("musicflamingo",),
    tested=(
        KnownCheckpoint(
            "musicflamingo",
            "MusicFlamingoForConditionalGeneration",
            "nvidia/music-flamingo-think-2601-hf",
            AUDIO,
            "windows of 30 s; reads the first 1200 s of an audio",
            by_census=True,
        ),
    ),
)
