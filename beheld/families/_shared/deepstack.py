"""Qwen3-VL and Qwen3-Omni: what some tower layers give is added to the hidden states behind the text's first layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from beheld.models.surgery.operation import Changes


class Deepstack:
    """Carries the features of L tower layers as L * H further columns of a row; zero for text."""

    def __init__(self, model: Any, changes: Changes) -> None:
        self._text = getattr(model.model, "language_model", model.model)
        self._hidden = model.config.get_text_config(decoder=True).hidden_size
        self._layers = len(model.config.vision_config.deepstack_visual_indexes)
        self.width = self._layers * self._hidden
        self._added: tuple[Tensor, ...] = ()
        for index in range(self._layers):
            changes.hook(self._text.layers[index].register_forward_hook(functools.partial(self._add, index)))

    def _add(self, index: int, layer: Any, inputs: Any, output: Tensor) -> Tensor:
        """Behind a layer: transformers' own way indexes by a mask, and reads it back from the device each time."""
        return output + self._added[index] if self._added else output

    def of_tokens(self, ids_T: Tensor, embeds_TH: Tensor) -> Tensor | None:
        """Nothing is added for text."""
        return None

    def of_media(self, result: Any) -> Tensor | None:
        """The tower's further features, side by side: (E, L * H); a tower for audio has none."""
        if getattr(result, "deepstack_features", None) is None:
            return None
        layers = [torch.cat(tuple(parts)) if isinstance(parts, list | tuple) else parts
                  for parts in result.deepstack_features]  # fmt: skip
        return torch.cat(layers, dim=-1)

    def of_given(self, embeds_EH: Tensor) -> Tensor | None:
        """Nothing is added for them."""
        return None

    def hidden(self, embeds_TH: Tensor, extra_TW: Tensor, positions: Tensor) -> Tensor:
        """Every token takes part: adding zeros changes nothing, and no index depends on the data."""
        self._added = tuple(part.unsqueeze(0) for part in extra_TW.split(self._hidden, dim=-1))
        try:
            output = self._text(inputs_embeds=embeds_TH.unsqueeze(0), position_ids=positions, use_cache=False)
        finally:
            self._added = ()
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH
