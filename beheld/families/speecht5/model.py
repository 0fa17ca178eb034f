"""SpeechT5: embeddings that are scaled, if at all, before sinusoidal positions are added.

Shapes: T tokens of the step, S size of a state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder, attending
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class SpeechT5(EncoderDecoder):
    """See EncoderDecoder."""

    norm = ""

    @classmethod
    def decoder(cls, model: Any) -> Any:
        """See EncoderDecoder."""
        return model.speecht5.decoder.wrapped_decoder

    @classmethod
    def encoder(cls, model: Any) -> Any:
        """See EncoderDecoder."""
        return model.speecht5.encoder

    @classmethod
    def adapt(cls, model: Any, changes: Changes) -> None:
        """See EncoderDecoder; the model's parts before and after the decoder have its tables."""
        super().adapt(model, changes)
        decoder = cls.decoder(model)
        changes.set(model, "get_decoder", lambda: decoder)
        for layer in decoder.layers:
            changes.set(layer.self_attn, "forward", attending(layer.self_attn))

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Scale, and add positions, which are counted from behind the padding's."""
        before = self._model.speecht5.decoder.prenet
        added = before.embed_positions.weights[positions_T + before.embed_positions.padding_idx + 1]
        return embeds_1TS * before.embed_scale + added.to(embeds_1TS.dtype), {}


MODEL = FamilyModel(adapt=SpeechT5.adapt, cross_inputs=SpeechT5, plain_head=True)
