"""Voxtral: audio in windows of 30 seconds."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("voxtral",),
    short_names=(
        ShortName(
            "voxtral-mini-3b",
            "mistralai/Voxtral-Mini-3B-2507",
            "voxtral",
            "Apache-2.0",
            4.7,
            "speech: transcripts, questions, summaries",
        ),
    ),
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
