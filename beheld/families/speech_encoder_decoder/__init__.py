"""Any encoder of speech before any decoder of text, of those that are known here."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.core.errors import ModelError
from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group
from beheld.families.vision_encoder_decoder import first_token

_ENCODERS = ("hubert", "wav2vec2")
_DECODERS = ("mbart",)
# States of 60 seconds.
_MOST_STATES = 3000


def _cross_group(config: Any) -> KVGroup:
    """Return all layers of the decoder.

    Raises:
        ModelError: one of the two parts is not known here.
    """
    hearing, writing = config.encoder.model_type, config.decoder.model_type
    if hearing not in _ENCODERS or writing not in _DECODERS:
        raise ModelError(
            f"{hearing} before {writing} in one model cannot be run yet.",
            f"Encoders can be {', '.join(_ENCODERS)}, decoders {', '.join(_DECODERS)}.",
        )
    return decoder_group(config.decoder, "cross", _MOST_STATES)


FAMILY = Family(
    model_types=("speech-encoder-decoder",),
    tested=(
        KnownCheckpoint(
            "speech-encoder-decoder",
            "SpeechEncoderDecoderModel",
            "facebook/wav2vec2-xls-r-300m-21-to-en",
            AUDIO,
            "one audio of up to 60 s per prompt; Wav2Vec2 or HuBERT before MBart's decoder; Wav2Vec2 is compared",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": first_token(config)},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config.decoder, "full"),),
    cross_group=_cross_group,
)
