"""Speech2Text: scaled embeddings and sinusoidal positions.

Shapes: T tokens of the step, E states of an item, S size of a state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel


class Speech2Text(EncoderDecoder):
    """See EncoderDecoder."""

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Scale, and add positions, which are counted from after the padding's."""
        decoder = self._decoder
        table = decoder.embed_positions.weights
        added = table[positions_T + decoder.padding_idx + 1].to(embeds_1TS.dtype)
        return embeds_1TS * decoder.embed_scale + added, {}


MODEL = FamilyModel(adapt=Speech2Text.adapt, cross_inputs=Speech2Text, plain_head=True)
