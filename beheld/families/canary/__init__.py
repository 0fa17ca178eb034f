"""Canary: NVIDIA's FastConformer hears, and a decoder writes after tokens of languages and task."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group

# States of the longest audio that is heard at once.
_MOST_STATES = 40 * 100 // 8 + 1

FAMILY = Family(
    model_types=("canary",),
    tested=(
        KnownCheckpoint(
            "canary",
            "CanaryForConditionalGeneration",
            "nvidia/canary-1b-v2",
            AUDIO,
            "an encoder hears one audio per prompt; longer audio is transcribed in windows",
            by_census=True,
        ),
    ),
    placeholder_tokens={"audio": "<|startofcontext|>"},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config.decoder_config, "full"),),
    cross_group=lambda config: decoder_group(config.decoder_config, "cross", _MOST_STATES),
)
