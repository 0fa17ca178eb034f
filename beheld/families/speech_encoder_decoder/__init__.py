"""Wav2Vec 2 before mBART's decoder, as XLS-R translates speech."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families._shared.hearing.config import MOST_SAMPLES, states_of
from beheld.families._shared.joined.config import check_parts, start_of
from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group


def _cross_group(config: Any) -> KVGroup:
    """Return one cross group: every decoder layer attends to the encoder's states.

    Raises:
        ModelError: a part is of another type.
    """
    check_parts(config, "SpeechEncoderDecoderModel", ("wav2vec2",))
    return decoder_group(config.decoder, "cross", states_of(config.encoder.to_dict(), MOST_SAMPLES))


FAMILY = Family(
    model_types=("speech-encoder-decoder",),
    tested=(
        KnownCheckpoint(
            "speech-encoder-decoder",
            "SpeechEncoderDecoderModel",
            "facebook/wav2vec2-xls-r-300m-en-to-15",
            AUDIO,
            "Wav2Vec 2 hears one audio per prompt, of a minute at most; the prompt begins the answer (`</s>` and a "
            "language)",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"audio": start_of(config)},
    encoder_reads="audio",
    kv_groups=lambda config: (decoder_group(config.decoder, "full"),),
    cross_group=_cross_group,
)
