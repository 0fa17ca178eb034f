"""Granite Speech: a conformer and a Q-Former in windows before Granite; plus: states of several layers."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("granite_speech", "granite_speech_plus"),
    tested=(
        KnownCheckpoint(
            "granite_speech",
            "GraniteSpeechForConditionalGeneration",
            "ibm-granite/granite-4.0-1b-speech",
            AUDIO,
            "needs torchaudio for the features that its processor computes; each audio as if it were the only one of "
            "its prompt",
            by_census=True,
        ),
        KnownCheckpoint(
            "granite_speech_plus",
            "GraniteSpeechPlusForConditionalGeneration",
            "ibm-granite/granite-speech-4.1-2b-plus",
            AUDIO,
            "likewise",
            by_census=True,
        ),
    ),
    package="torchaudio",
    calls=("granite", "hermes"),
    reasoning=("ernie45",),
)
