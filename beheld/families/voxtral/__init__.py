"""Voxtral: audio in windows of 30 seconds."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("voxtral",),
    tested=(
        KnownCheckpoint(
            "voxtral",
            "VoxtralForConditionalGeneration",
            "mistralai/Voxtral-Mini-3B-2507",
            AUDIO,
            "windows of 30 s, each filled up; without mistral-common; no tools",
        ),
    ),
    calls=("mistral",),
    reasoning=("mistral",),
)
