"""Encoders of images before decoders of text that are made as BART's.

Shapes: T tokens of the step, E states of an item, S size of a state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder, attending
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class SeeingDecoder(EncoderDecoder):
    """See EncoderDecoder."""

    @classmethod
    def decoder(cls, model: Any) -> Any:
        """See EncoderDecoder."""
        return model.decoder.model.decoder

    @classmethod
    def encoder(cls, model: Any) -> Any:
        """See EncoderDecoder."""
        return model.encoder

    @classmethod
    def adapt(cls, model: Any, changes: Changes) -> None:
        """See EncoderDecoder."""
        super().adapt(model, changes)
        decoder = cls.decoder(model)
        changes.set(model, "get_decoder", lambda: decoder)
        if model.config.decoder.model_type == "trocr":
            for layer in decoder.layers:
                changes.set(layer.self_attn, "forward", attending(layer.self_attn))

    def projected(self, states_ES: Tensor) -> Tensor:
        """See EncoderDecoder."""
        project = getattr(self._model, "enc_to_dec_proj", None)
        return states_ES if project is None else project(states_ES)

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Add positions, whose table has further rows before the first, and norm if there is a norm."""
        decoder, table = self._decoder, self._decoder.embed_positions
        if hasattr(table, "weight"):
            added = table.weight[positions_T + table.offset]
        else:
            added = table.weights.to(embeds_1TS.device, embeds_1TS.dtype)[positions_T + table.padding_idx + 1]
        hidden_1TS = embeds_1TS + added
        norm = getattr(decoder, "layernorm_embedding", None)
        return hidden_1TS if norm is None else norm(hidden_1TS), {}


class TrOCR(SeeingDecoder):
    """TrOCR's decoder ends with its layers."""

    norm = ""


def crossing(model: Any) -> SeeingDecoder:
    """Return what the decoder of a model attends to."""
    return TrOCR(model) if model.config.decoder.model_type == "trocr" else SeeingDecoder(model)


MODEL = FamilyModel(adapt=SeeingDecoder.adapt, cross_inputs=crossing, plain_head=True)
