"""Moonshine Streaming: the decoder gives each state of the encoder a learned position.

Shapes: E states of an item, S size of a state.
"""

from __future__ import annotations

from torch import Tensor

from beheld.families.model import FamilyModel
from beheld.families.moonshine.model import Moonshine


class MoonshineStreaming(Moonshine):
    """See EncoderDecoder."""

    def projected(self, states_ES: Tensor) -> Tensor:
        """See EncoderDecoder."""
        placed_ES = states_ES + self._decoder.pos_emb.weight[: len(states_ES)]
        made_ES: Tensor = self._decoder.proj(placed_ES)
        return made_ES


MODEL = FamilyModel(adapt=MoonshineStreaming.adapt, cross_inputs=MoonshineStreaming, plain_head=True)
