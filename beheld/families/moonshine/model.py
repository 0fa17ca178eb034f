"""Moonshine: the decoder rotates its queries and keys.

Shapes: T tokens of the step, E states of an item, S size of a state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel


class Moonshine(EncoderDecoder):
    """See EncoderDecoder."""

    norm = "norm"
    output = "o_proj"

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Compute the rotation of each position."""
        rotation = self._decoder.rotary_emb(embeds_1TS, position_ids=positions_T.unsqueeze(0))
        return embeds_1TS, {"position_embeddings": rotation}


MODEL = FamilyModel(adapt=Moonshine.adapt, cross_inputs=Moonshine, plain_head=True)
