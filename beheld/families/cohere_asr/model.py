"""Cohere's transcription model: the decoder projects what is heard.

Shapes: T tokens of the step, E states of an item, S size of a state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel


class CohereAsr(EncoderDecoder):
    """See EncoderDecoder."""

    norm = "norm"
    output = "o_proj"

    def projected(self, states_ES: Tensor) -> Tensor:
        """Return states of the decoder's size."""
        states: Tensor = self._decoder.proj(states_ES)
        return states

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Add positions and normalize."""
        added = self._decoder.pos_emb(positions_T).to(embeds_1TS.dtype)
        return self._decoder.embedding_layernorm(embeds_1TS + added), {}


MODEL = FamilyModel(adapt=CohereAsr.adapt, cross_inputs=CohereAsr, plain_head=True)
