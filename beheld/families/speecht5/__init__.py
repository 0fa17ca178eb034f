"""SpeechT5 that transcribes: Wav2Vec 2's convolutions and an encoder, and a decoder with sinusoidal positions."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families._shared.hearing.config import MOST_SAMPLES, states_of
from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group


def _cross_group(config: Any) -> KVGroup:
    return decoder_group(config, "cross", states_of(config.to_dict(), MOST_SAMPLES))


FAMILY = Family(
    model_types=("speecht5",),
    architectures=("SpeechT5ForSpeechToText",),
    tested=(
        KnownCheckpoint(
            "speecht5",
            "SpeechT5ForSpeechToText",
            "microsoft/speecht5_asr",
            AUDIO,
            "an encoder hears one audio per prompt, of a minute at most; longer audio is transcribed in windows",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": config.decoder_start_token_id},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config, "full"),),
    cross_group=_cross_group,
)
