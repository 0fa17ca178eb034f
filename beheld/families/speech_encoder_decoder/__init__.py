"""Wav2Vec 2 before mBART's decoder, as XLS-R translates speech."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.config import KVGroup
from beheld.families._shared.joined.config import check_parts, start_of
from beheld.families.family import AUDIO, Family, KnownCheckpoint, decoder_group
from beheld.families.speecht5 import convolved

# Samples of the longest audio that is heard at once: a minute.
_MOST_SAMPLES = 60 * 16000
_KERNELS, _STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)


def states_of(encoder: Mapping[str, Any], samples: int) -> int:
    """Return how many states Wav2Vec 2 makes of a waveform, with an adapter if it has one."""
    count = convolved(samples, encoder.get("conv_kernel", _KERNELS), encoder.get("conv_stride", _STRIDES))
    for _ in range(encoder.get("num_adapter_layers", 3) if encoder.get("add_adapter") else 0):
        count = (count - 1) // encoder.get("adapter_stride", 2) + 1
    return count


def _cross_group(config: Any) -> KVGroup:
    """Return one cross group: every decoder layer attends to the encoder's states.

    Raises:
        ModelError: a part is of another type.
    """
    check_parts(config, "SpeechEncoderDecoderModel", ("wav2vec2",))
    return decoder_group(config.decoder, "cross", states_of(config.encoder.to_dict(), _MOST_SAMPLES))


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
