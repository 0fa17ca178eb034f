"""Linear layers and experts stored by a quantization method, and what can be done with any of them.

A method brings its own StoredLinear and StoredExperts; layers whose weights are not quantized are plain `nn.Linear`.
Code that joins, cuts or shards layers uses this file and knows no method.

Shapes: G experts, N outputs, K inputs, T tokens, C choices of experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from beheld.platform.registry import platform_of


class StoredLinear(nn.Module, ABC):
    """A linear layer that stores its weights as its method does.

    Attributes:
        in_features, out_features: K and N.
        weight: empty; gives the type of the activations, and the device, to models that ask for them.
        bias: (N,) or None.
        cuts_in_place: `part` copies no weights.
    """

    cuts_in_place: ClassVar[bool] = True

    def __init__(
        self,
        shape_NK: Sequence[int],
        bias_N: Tensor | None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape_NK
        self.bias = None if bias_N is None else nn.Parameter(bias_N, requires_grad=False)
        self.weight = torch.empty(0, dtype=dtype, device=device)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""

    def joins(self, other: StoredLinear) -> bool:
        """Return whether another layer of this kind and input size can be joined with this one."""
        return True

    @classmethod
    @abstractmethod
    def joined(cls, layers: Sequence[Self]) -> Self:
        """Join layers with the same input into one, outputs in order."""

    @abstractmethod
    def part(self, outputs: slice) -> Self:
        """Return a layer of these outputs alone, sharing memory where possible."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """Return the weights that the layer multiplies, (N, K)."""

    def restored(self) -> nn.Module:
        """Return a plain linear layer with the dequantized weights, in the type of the activations."""
        return linear_of(self.dequantized().to(self.weight.dtype), bias_of(self))


class StoredExperts(nn.Module, ABC):
    """Experts that store their weights as their method does, in place of transformers' experts."""

    num_experts: int
    # Set where choices may name an expert that does not exist; transformers chose the name.
    _is_expert_parallel = False

    @abstractmethod
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts: hidden_states (T, K), choices (T, C) and their weights -> (T, K)."""

    @abstractmethod
    def part(self, experts: slice) -> Self:
        """Return a module of these experts alone, numbered from zero."""

    @abstractmethod
    def restored(self) -> nn.Module:
        """Return transformers' experts with the dequantized weights."""

    def _summed(self, out_SK: Tensor, choices_TC: Tensor, shares_TC: Tensor) -> Tensor:
        """Return the sum (T, K) of what the chosen experts give, each times its share; S counts tokens' choices."""
        if platform_of(out_SK.device).has_triton:
            out: Tensor = torch.ops.beheld.expert_sum(out_SK, None, choices_TC, shares_TC, self.num_experts)
            return out
        out_TCK = out_SK.view(*choices_TC.shape, -1)
        if self._is_expert_parallel:
            out_TCK = out_TCK.masked_fill((choices_TC >= self.num_experts).unsqueeze(-1), 0.0)
        # Sums use the type of the shares, which routers give in float32.
        return (out_TCK * shares_TC.unsqueeze(-1)).sum(1)


class OneRowExperts(StoredExperts):
    """Stored experts with a kernel for a single row, which models/surgery/expert_row.py tries and then switches on."""

    one_row = False

    @property
    @abstractmethod
    def inputs(self) -> int:
        """Return the number of inputs, without padding."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the type of activations."""


def same_form(layers: Sequence[Any]) -> bool:
    """Return whether these are linear layers of one kind and input size, so that they can be joined."""
    kinds = {(type(layer), getattr(layer, "in_features", None)) for layer in layers}
    if len(kinds) > 1 or not all(type(layer) is nn.Linear or isinstance(layer, StoredLinear) for layer in layers):
        return False
    first = layers[0]
    return not isinstance(first, StoredLinear) or all(first.joins(layer) for layer in layers[1:])


def join(layers: Sequence[Any]) -> nn.Module:
    """Join linear layers of one kind and input into one, outputs in order."""
    first = layers[0]
    if isinstance(first, StoredLinear):
        return type(first).joined(layers)
    bias = joined_bias(layers)
    return linear_of(torch.cat([layer.weight.data for layer in layers]), bias)


def bias_of(layer: Any, outputs: slice = slice(None)) -> Tensor | None:
    """Return the bias of a layer's outputs, sharing memory; None if it has none."""
    return None if layer.bias is None else layer.bias.data[outputs]


def joined_bias(layers: Sequence[Any]) -> Tensor | None:
    """Return the joined biases of several layers, zeros for layers without one; None if no layer has a bias."""
    if all(layer.bias is None for layer in layers):
        return None
    filled = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers]
    return torch.cat(filled)


def part(layer: Any, outputs: slice) -> nn.Module:
    """Return some outputs of a linear layer, sharing its memory."""
    if isinstance(layer, StoredLinear):
        return layer.part(outputs)
    return linear_of(layer.weight.data[outputs], bias_of(layer, outputs))


def linear_of(weight_NK: Tensor, bias_N: Tensor | None = None) -> nn.Linear:
    """Return a plain linear layer that shares this weight, which may be strided, and this bias."""
    linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    if bias_N is not None:
        linear.bias = nn.Parameter(bias_N, requires_grad=False)
    return linear
