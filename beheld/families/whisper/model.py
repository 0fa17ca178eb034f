"""Whisper: the encoder hears a window of audio, and every decoder layer attends to its states.

Shapes: T tokens of the step, E states of a window, S size of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.attention.cross import CrossView
from beheld.core.errors import StepError
from beheld.core.plan import EncodeItem, SpanView
from beheld.families._shared.bart_decoder import adapt_decoder
from beheld.families.model import FamilyModel
from beheld.models.cross import keys_and_values
from beheld.models.surgery.operation import Changes

# The layers only test whether there are states; our attention finds the states itself.
_SOME = True


def adapt(model: Any, changes: Changes) -> None:
    """Direct the decoder's self-attention to our hook, add our cross-attention, and leave the encoder alone."""
    adapt_decoder(model.model.decoder, changes)


class Whisper:
    """See CrossInputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._encoder = model.model.encoder
        self._decoder = model.model.decoder
        self._layers: list[Any] = [layer.encoder_attn for layer in self._decoder.layers]
        strides = self._encoder.conv1.stride[0] * self._encoder.conv2.stride[0]
        self._num_frames: int = model.config.max_source_positions * strides

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Return keys and values of whole windows, all of which share a call.

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
        states_BES = self._encoder(features.to(weight.device, weight.dtype, non_blocking=True)).last_hidden_state
        return [keys_and_values(self._layers, states_ES) for states_ES in states_BES]

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """Return views in which every position hears the whole window."""
        return tuple(CrossView(0, None, span.num_states) for span in spans)

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states (T, S) of the decoder, with learned positions of several sequences."""
        decoder = self._decoder
        hidden = embeds_TH.unsqueeze(0) + decoder.embed_positions.weight[positions[0]]
        for layer in decoder.layers:
            hidden = layer(hidden, encoder_hidden_states=_SOME, use_cache=False)
        hidden_TS: Tensor = decoder.layer_norm(hidden)[0]
        return hidden_TS


MODEL = FamilyModel(adapt=adapt, cross_inputs=Whisper, plain_head=True)
