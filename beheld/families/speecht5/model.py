"""SpeechT5: a decoder whose attention is its own, after a part that embeds text.

Shapes: T tokens of the step, S size of a state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class SpeechT5(EncoderDecoder):
    """See EncoderDecoder."""

    norm = ""

    @classmethod
    def decoder(cls, model: Any) -> Any:
        """Return the decoder after the part that embeds."""
        return model.speecht5.decoder.wrapped_decoder

    @classmethod
    def encoder(cls, model: Any) -> Any:
        """Return the encoder with its convolutions."""
        return model.speecht5.encoder

    @classmethod
    def exchanges(cls, decoder: Any) -> bool:
        """Return True: its attention is its own."""
        return True

    @classmethod
    def adapt(cls, model: Any, changes: Changes) -> None:
        """Name the decoder and its table of tokens; see EncoderDecoder."""
        embedding = model.speecht5.decoder.prenet.embed_tokens
        changes.set(model, "get_decoder", lambda: cls.decoder(model))
        changes.set(model, "get_input_embeddings", lambda: embedding)
        super().adapt(model, changes)

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Scale, and add positions, which are counted from after the padding's."""
        prenet = self._model.speecht5.decoder.prenet
        table = prenet.embed_positions
        added = table.weights.to(embeds_1TS)[positions_T + table.padding_idx + 1]
        return embeds_1TS * prenet.embed_scale + added, {}


MODEL = FamilyModel(adapt=SpeechT5.adapt, cross_inputs=SpeechT5, plain_head=True)
