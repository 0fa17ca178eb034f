"""PP-FormulaNet: a decoder as BART's, with learned positions, after projected patches.

Shapes: T tokens of the step, E states of an item, S size of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from beheld.core.plan import EncodeItem
from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class PPFormulaNet(EncoderDecoder):
    """See EncoderDecoder."""

    @classmethod
    def adapt(cls, model: Any, changes: Changes) -> None:
        """See EncoderDecoder; the model does not say where its table of tokens is."""
        changes.set(model, "get_input_embeddings", lambda: cls.decoder(model).embed_tokens)
        super().adapt(model, changes)

    def states(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """See EncoderDecoder; the decoder attends to what follows the encoder's projector."""
        weight = self._model.get_input_embeddings().weight
        pixels = [item.features["pixel_values"].to(weight.device, weight.dtype) for item in items]
        return [self.encoder(self._model)(pixel_values=each).pooler_output[0] for each in pixels]

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Add learned positions, whose table has further rows before the first, and norm."""
        table = self._decoder.embed_positions
        return self._decoder.layernorm_embedding(embeds_1TS + table.weight[positions_T + table.offset]), {}


MODEL = FamilyModel(adapt=PPFormulaNet.adapt, cross_inputs=PPFormulaNet, plain_head=True)
