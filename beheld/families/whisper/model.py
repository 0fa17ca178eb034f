"""Whisper: the encoder hears a window of audio, and every decoder layer attends to its states.

Shapes: B windows of a call, T tokens of the step, E states of a window, S size of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import StepError
from beheld.core.plan import EncodeItem
from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel


class Whisper(EncoderDecoder):
    """See EncoderDecoder."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._encoder = model.model.encoder
        strides = self._encoder.conv1.stride[0] * self._encoder.conv2.stride[0]
        self._num_frames: int = model.config.max_source_positions * strides

    def states(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """Return the states of whole windows, all of which share a call.

        Raises:
            StepError: a spectrogram has another length than the encoder's.
        """
        for item in items:
            frames = item.features["input_features"].shape[-1]
            if frames != self._num_frames:
                # Checked on the host; on a GPU, the failure would end all requests.
                raise StepError(f"its spectrogram has {frames} frames, but the encoder hears {self._num_frames}.")
        weight = self._model.get_input_embeddings().weight
        features = torch.cat([item.features["input_features"] for item in items])
        states_BES: Tensor = self._encoder(
            features.to(weight.device, weight.dtype, non_blocking=True)
        ).last_hidden_state
        return list(states_BES)

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Add learned positions."""
        return embeds_1TS + self._decoder.embed_positions.weight[positions_T], {}


MODEL = FamilyModel(adapt=Whisper.adapt, cross_inputs=Whisper, plain_head=True)
