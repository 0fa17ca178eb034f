"""Cross-attention layers that replace transformers' layers and read keys and values computed earlier.

Shapes: T tokens of the step, E states, S state size, H query heads, K key-value heads, C head size, L such layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.op import attend_cross


class CrossAttention(nn.Module):
    """Cross-attention with the weights, under the same names, of the module it replaces.

    Args:
        layer: the index of the text model's layer.
        projections: "q", "k", "v" and "o" -> (name, linear layer); the module keeps these names.
        norms: "q" and "k" -> (name, norm of each head); empty in some families.
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
        """Return what this layer keeps of an item: (2, E, K, C)."""
        return torch.stack([self._heads(kind, states_ES) for kind in ("k", "v")])

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Attend (1, T, S) -> (1, T, S); the input of the last projection is zero where a token attends to nothing.

        Other arguments of the enclosing layer concern states, masks and caches that are not used here.
        """
        out_1THC = attend_cross(self.layer, self._heads("q", hidden_states), self.scale)
        out: Tensor = getattr(self, self._projections["o"])(out_1THC.flatten(-2))
        return out, None


def keys_and_values(layers: Sequence[CrossAttention], states_ES: Tensor) -> Tensor:
    """Return keys and values of one item in all layers, (E, L, 2, K, C), contiguous per layer."""
    return torch.stack([layer.keys_and_values(states_ES) for layer in layers]).movedim(2, 0)


def crosses(module: nn.Module) -> bool:
    """Return whether a layer, or a part of it, is cross-attention."""
    return any(isinstance(part, CrossAttention) for part in module.modules())
