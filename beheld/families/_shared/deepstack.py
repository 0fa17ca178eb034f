"""Outputs of some tower layers are added to hidden states between text layers: after the first ones, as in Qwen3-VL."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.models.surgery.operation import Changes


class Deepstack:
    """Carries the features of L tower layers as L * H extra columns of a row; zero for text.

    Args:
        before: the text layers before which features are added, in the order of the tower's result; None for those
            after which Qwen3-VL adds them, the first ones.
    """

    def __init__(self, model: Any, changes: Changes, before: Sequence[int] | None = None) -> None:
        parts = (getattr(model.model, name, None) for name in ("language_model", "text_model"))
        self._text: Any = next((part for part in parts if part is not None), model.model)
        self._hidden = model.config.get_text_config(decoder=True).hidden_size
        count = len(model.config.vision_config.deepstack_visual_indexes) if before is None else len(before)
        self.width = count * self._hidden
        self._added: tuple[Tensor, ...] = ()
        for index in range(count):
            if before is None:
                changes.hook(self._text.layers[index].register_forward_hook(functools.partial(self._add, index)))
            else:
                layer = self._text.layers[before[index]]
                changes.hook(layer.register_forward_pre_hook(functools.partial(self._add_before, index)))

    def _add(self, index: int, layer: Any, inputs: Any, output: Tensor) -> Tensor:
        """Add features after a layer, without the mask that transformers reads back from the device."""
        return output + self._added[index] if self._added else output

    def _add_before(self, index: int, layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add features before a layer."""
        return (inputs[0] + self._added[index], *inputs[1:]) if self._added else inputs

    def of_tokens(self, ids_T: Tensor, embeds_TH: Tensor) -> Tensor | None:
        """Return None: text adds zero."""
        return None

    def of_media(self, result: Any) -> Tensor | None:
        """Return the tower's extra features, concatenated: (E, L * H); none for an audio tower."""
        if getattr(result, "deepstack_features", None) is None:
            return None
        layers = [torch.cat(tuple(parts)) if isinstance(parts, list | tuple) else parts
                  for parts in result.deepstack_features]  # fmt: skip
        return torch.cat(layers, dim=-1)

    def of_given(self, embeds_EH: Tensor) -> Tensor | None:
        """Return zeros: given embeddings have no such features."""
        return None

    def hidden(self, embeds_TH: Tensor, extra_TW: Tensor, positions: Tensor) -> Tensor:
        """Run the layers; all tokens take part, because adding zeros changes nothing and needs no index."""
        self._added = tuple(part.unsqueeze(0) for part in extra_TW.split(self._hidden, dim=-1))
        try:
            output = self._text(inputs_embeds=embeds_TH.unsqueeze(0), position_ids=positions, use_cache=False)
        finally:
            self._added = ()
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH
