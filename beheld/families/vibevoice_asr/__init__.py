"""VibeVoice-ASR: an acoustic and a semantic encoder of the waveform before Qwen2."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("vibevoice_asr",),
    tested=(
        KnownCheckpoint(
            "vibevoice_asr",
            "VibeVoiceAsrForConditionalGeneration",
            "microsoft/VibeVoice-ASR-HF",
            AUDIO,
            "without the noise that transformers adds to what is heard without sample=False",
            by_census=True,
        ),
    ),
)
