"""Cohere's transcription model: NVIDIA's FastConformer hears, and a decoder writes after tokens of the task."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group

# States of the longest audio that is heard at once.
_MOST_STATES = 40 * 100 // 8 + 1

FAMILY = Family(
    model_types=("cohere_asr",),
    tested=(
        KnownCheckpoint(
            "cohere_asr",
            "CohereAsrForConditionalGeneration",
            "CohereLabs/cohere-transcribe-03-2026",
            AUDIO,
            "an encoder hears one audio per prompt; longer audio is transcribed in windows",
            by_census=True,
        ),
    ),
    placeholder_tokens={"audio": "<|startofcontext|>"},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config, "full"),),
    cross_group=lambda config: decoder_group(config, "cross", _MOST_STATES),
)
