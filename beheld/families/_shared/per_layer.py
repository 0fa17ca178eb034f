"""Gemma 3n and Gemma 4: every layer adds an embedding that it looks up by the token's id."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import ModelError
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model


class PerLayer:
    """Carries the embeddings of L layers, D numbers each, as L * D extra columns of a row.

    Media have the padding token's columns, because its id, 0, fills their places in a batch.
    """

    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config(decoder=True)
        if text.pad_token_id != 0:
            raise ModelError(f"{type(model).__name__} has the padding id {text.pad_token_id}; only 0 is supported.")
        self._shape = (text.num_hidden_layers, text.hidden_size_per_layer_input)
        self.width = self._shape[0] * self._shape[1]
        inner = text_model(model)
        self._look_up = inner.get_per_layer_inputs
        self._rows = text.vocab_size_per_layer_input
        named = "per_layer_inputs" in inspect.signature(model.model.forward).parameters
        # In older versions only the text model inside takes the keyword.
        self._core = model.model if named else inner
        self._further = len(inspect.signature(self._look_up).parameters) - 1

    def of_tokens(self, ids_T: Tensor, embeds_TH: Tensor) -> Tensor | None:
        """Return the layers' embeddings: (T, L * D)."""
        # Ids beyond the table use the padding token's embedding; not every version does this itself.
        known_T = torch.where(ids_T < self._rows, ids_T, 0)
        found: Tensor = self._look_up(known_T.unsqueeze(0), *[None] * self._further)
        return found[0].flatten(1).to(embeds_TH.dtype)

    def of_media(self, result: Any) -> Tensor | None:
        """Return None: the tower has no columns."""
        return None

    def of_given(self, embeds_EH: Tensor) -> Tensor | None:
        """Return None: given embeddings have no columns."""
        return None

    def hidden(self, embeds_TH: Tensor, extra_TW: Tensor, positions: Tensor) -> Tensor:
        """Run the layers with the columns as a keyword."""
        output = self._core(
            inputs_embeds=embeds_TH.unsqueeze(0),
            per_layer_inputs=extra_TW.unflatten(-1, self._shape).unsqueeze(0),
            position_ids=positions,
            use_cache=False,
        )
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH


def extra_columns(model: Any, changes: Changes) -> PerLayer | None:
    """Return this model's extra columns, if its layers look anything up; see ExtraColumns."""
    text = model.config.get_text_config(decoder=True)
    return PerLayer(model) if getattr(text, "hidden_size_per_layer_input", None) else None
