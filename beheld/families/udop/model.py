"""UDOP: T5's decoder over the states of a question, a page's words and its patches.

Shapes: T tokens of the step, E states of a prompt, N tokens of its text, S size of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import StepError
from beheld.core.plan import EncodeItem
from beheld.families._shared.t5.model import T5Decoder
from beheld.families.model import FamilyModel

# Where transformers' tokenizer puts the end of a question.
_END_BOX = 1000


class Udop(T5Decoder):
    """See EncoderDecoder."""

    def states(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """Return the states (E, S) of prompts.

        Raises:
            StepError: a prompt has no page, or not as many patches as its processor counted.
        """
        return [self._read(item) for item in items]

    def _read(self, item: EncodeItem) -> Tensor:
        weight = self._model.get_input_embeddings().weight
        if "bbox" not in item.features:
            raise StepError("UDOP reads a page with every question.")
        ids_E = item.features["input_ids"][0]
        ids_1N = ids_E[ids_E != self._model.config.pad_token_id].unsqueeze(0)
        places_14 = item.features["bbox"]
        bbox_1N4 = torch.zeros((1, ids_1N.shape[1], 4), dtype=places_14.dtype)
        own = places_14.shape[1]
        bbox_1N4[:, -own:] = places_14
        # A page alone, with which an engine tries its processor, has no question, and so one patch more.
        asked = ids_1N.shape[1] > own
        if asked:
            bbox_1N4[:, -own - 1] = _END_BOX
        made: Any = self.encoder(self._model)(
            input_ids=ids_1N.to(weight.device),
            attention_mask=torch.ones_like(ids_1N).to(weight.device),
            bbox=bbox_1N4.to(weight.device),
            pixel_values=item.features["pixel_values"].to(weight.device, weight.dtype),
        )
        # Patches that were joined to words leave padding after the others.
        states_ES: Tensor = made.last_hidden_state[0][made.attention_mask[0] > 0]
        states_ES = states_ES if asked else states_ES[: len(ids_E)]
        if len(states_ES) != len(ids_E):
            raise StepError(f"the encoder makes {len(states_ES)} states of it; {len(ids_E)} were expected.")
        return states_ES

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states, scaled for the head, which shares the table of tokens."""
        return super().hidden(embeds_TH, positions) * self._model.config.d_model**-0.5


MODEL = FamilyModel(adapt=Udop.adapt, cross_inputs=Udop, plain_head=True)
