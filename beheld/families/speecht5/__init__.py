"""SpeechT5 as it is fine-tuned to transcribe: an encoder of waveforms, and a decoder with sinusoidal positions."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.core.errors import ModelError
from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group

_CLASS = "SpeechT5ForSpeechToText"


def _cross_group(config: Any) -> KVGroup:
    """Return all layers; the encoder has a position for each state.

    Raises:
        ModelError: the class does not answer in text.
    """
    names = getattr(config, "architectures", None) or [_CLASS]
    if names[0] != _CLASS:
        raise ModelError(f"{names[0]} cannot be run: it does not answer in text.", f"Of SpeechT5, {_CLASS} can.")
    return decoder_group(config, "cross", config.max_speech_positions)


FAMILY = Family(
    model_types=("speecht5",),
    tested=(
        KnownCheckpoint(
            "speecht5",
            _CLASS,
            "microsoft/speecht5_asr",
            AUDIO,
            "transcripts of one audio per prompt, letter by letter; it does not speak",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": config.decoder_start_token_id},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config, "full"),),
    cross_group=_cross_group,
)
