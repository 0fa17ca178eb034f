"""Pix2Struct: T5's decoder under other names."""

from __future__ import annotations

from typing import Any

from beheld.families._shared.t5.model import T5Decoder
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class Pix2Struct(T5Decoder):
    """See EncoderDecoder."""

    inputs = ("query", "key", "value")
    output = "output"
    crossing = "attention"
    listed = "layer"

    @classmethod
    def attending(cls, layer: Any) -> Any:
        """See EncoderDecoder."""
        return layer.self_attention.attention

    @classmethod
    def holder(cls, layer: Any) -> Any:
        """See EncoderDecoder."""
        return layer.encoder_decoder_attention

    @classmethod
    def adapt(cls, model: Any, changes: Changes) -> None:
        """Name the head, which the decoder holds; see EncoderDecoder."""
        changes.set(model, "get_output_embeddings", lambda: cls.decoder(model).lm_head)
        super().adapt(model, changes)


MODEL = FamilyModel(adapt=Pix2Struct.adapt, cross_inputs=Pix2Struct, plain_head=True)
