"""Layers that attend beside the text, in place of transformers' own: their keys and values were computed long before.

Shapes: T tokens of the step, E states, S state size, H query heads, K key-value heads, C head size, L such layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.op import attend_cross


class CrossAttention(nn.Module):
    """The same weights under the same names as the module that it replaces.

    Args:
        layer: the text model's layer that it belongs to.
        projections: "q", "k", "v" and "o" -> the linear layers; they keep the names that `named` gives them.
        norms: "q" and "k" -> norms of each head; none in some families.
        head_dim: C.
        scale: of the scores.
    """

    def __init__(
        self,
        layer: int,
        projections: dict[str, tuple[str, nn.Module]],
        norms: dict[str, tuple[str, nn.Module]],
        head_dim: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim
        self.scale = scale
        self._projections = {kind: name for kind, (name, _) in projections.items()}
        self._norms = {kind: name for kind, (name, _) in norms.items()}
        for name, module in (*projections.values(), *norms.values()):
            self.add_module(name, module)

    def _heads(self, kind: str, x: Tensor) -> Tensor:
        heads: Tensor = getattr(self, self._projections[kind])(x).unflatten(-1, (-1, self.head_dim))
        norm = self._norms.get(kind)
        return heads if norm is None else getattr(self, norm)(heads)

    def keys_and_values(self, states_ES: Tensor) -> Tensor:
        """What is kept of an item for this layer: (2, E, K, C)."""
        return torch.stack([self._heads(kind, states_ES) for kind in ("k", "v")])

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """(1, T, S) -> (1, T, S); zero before the last projection where a token looks at nothing.

        Whatever else the layer around it passes speaks of states, masks and caches that are not its own.
        """
        out_1THC = attend_cross(self.layer, self._heads("q", hidden_states), self.scale)
        out: Tensor = getattr(self, self._projections["o"])(out_1THC.flatten(-2))
        return out, None


def keys_and_values(layers: Sequence[CrossAttention], states_ES: Tensor) -> Tensor:
    """Keys and values of one item in all layers: (E, L, 2, K, C), each layer's side by side in memory."""
    return torch.stack([layer.keys_and_values(states_ES) for layer in layers]).movedim(2, 0)


def crosses(module: nn.Module) -> bool:
    """True if a layer, or a part of it, attends beside the text."""
    return any(isinstance(part, CrossAttention) for part in module.modules())
