"""Moonshine: convolutions over the waveform and an encoder, and a decoder with rotary positions."""

from __future__ import annotations

from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group

# States of the longest audio that is heard at once.
_MOST_STATES = 64 * 16000 // 384

FAMILY = Family(
    model_types=("moonshine",),
    tested=(
        KnownCheckpoint(
            "moonshine",
            "MoonshineForConditionalGeneration",
            "UsefulSensors/moonshine-tiny",
            AUDIO,
            "an encoder hears one audio per prompt; longer audio is transcribed in windows",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": config.decoder_start_token_id},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config, "full"),),
    cross_group=lambda config: decoder_group(config, "cross", _MOST_STATES),
)
