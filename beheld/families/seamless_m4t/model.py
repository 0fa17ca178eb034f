"""SeamlessM4T: a decoder with sinusoidal positions after a conformer.

Shapes: T tokens of the step, S size of a state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel


class Seamless(EncoderDecoder):
    """See EncoderDecoder; embeddings are scaled by their table."""

    crossing = "cross_attention"

    @classmethod
    def decoder(cls, model: Any) -> Any:
        """See EncoderDecoder."""
        return model.text_decoder

    @classmethod
    def encoder(cls, model: Any) -> Any:
        """See EncoderDecoder."""
        return model.speech_encoder

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Add positions, which are counted from after the padding's."""
        decoder = self._decoder
        added = decoder.embed_positions.weights[positions_T + decoder.padding_idx + 1]
        return embeds_1TS + added.to(embeds_1TS.dtype), {}


MODEL = FamilyModel(
    adapt=Seamless.adapt,
    cross_inputs=Seamless,
    plain_head=True,
    unused_weights=("text_encoder.", "t2u_model.", "vocoder."),
)
