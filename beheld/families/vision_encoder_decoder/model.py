"""Donut, Nougat and TrOCR: a decoder of BART's kind, inside its own class with a head.

Shapes: T tokens of the step, E states of an item, S size of a state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel


class VisionEncoderDecoder(EncoderDecoder):
    """See EncoderDecoder."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # Of TrOCR, each layer ends with a norm.
        self.norm = "layer_norm" if hasattr(self._decoder, "layer_norm") else ""  # type: ignore[misc]
        self._table: Tensor | None = None
        table = self._decoder.embed_positions
        if hasattr(table, "weights"):
            # It is no buffer, so that what loads a model leaves it without numbers.
            made = table.get_embedding(len(table.weights), table.embedding_dim, table.padding_idx)
            weight = model.get_input_embeddings().weight
            self._table = made.to(weight.device, weight.dtype)[table.padding_idx + 1 :]

    @classmethod
    def decoder(cls, model: Any) -> Any:
        """Return the decoder within its class."""
        return model.decoder.model.decoder

    @classmethod
    def encoder(cls, model: Any) -> Any:
        """Return the tower."""
        return model.encoder

    @classmethod
    def exchanges(cls, decoder: Any) -> bool:
        """Return whether it is TrOCR's, whose attention is its own."""
        return bool(decoder.config.model_type == "trocr")

    def projected(self, states_ES: Tensor) -> Tensor:
        """Return states of the decoder's size, if the tower has another."""
        projection = getattr(self._model, "enc_to_dec_proj", None)
        return states_ES if projection is None else projection(states_ES)

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Add positions, learned or, of some TrOCR, sinusoidal; normalize unless a checkpoint does not."""
        table, norm = self._decoder.embed_positions, self._decoder.layernorm_embedding
        places = table(None, position_ids=positions_T) if self._table is None else self._table[positions_T]
        embeds_1TS = embeds_1TS + places
        return embeds_1TS if norm is None else norm(embeds_1TS), {}


MODEL = FamilyModel(adapt=VisionEncoderDecoder.adapt, cross_inputs=VisionEncoderDecoder, plain_head=True)
