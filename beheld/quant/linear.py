"""Linear layers and experts whose weights a method stores in a form of its own, and what is done to any of them.

A method brings its own StoredLinear (and StoredExperts); layers whose weights are stored as they are computed are plain
`nn.Linear`. What joins, cuts or shards layers asks here and knows no method.

Shapes: G experts, N outputs, K inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ShardUnits:
    """In which multiples a layer's outputs and inputs can be cut: packed numbers, groups of a scale, kernels' tiles."""

    outputs: int = 1
    inputs: int = 1


class StoredLinear(nn.Module, ABC):
    """A linear layer that keeps its weights as a method stores them.

    Attributes:
        in_features, out_features: K and N.
        weight: of no elements; it tells type and device to models that ask for them.
        bias: (N,) or None.
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)."""

    @property
    @abstractmethod
    def units(self) -> ShardUnits:
        """In which units it can be sharded."""

    @classmethod
    @abstractmethod
    def joined(cls, layers: Sequence[Self]) -> Self:
        """Layers of one input as one, the outputs one after the other."""

    @abstractmethod
    def part(self, outputs: slice) -> Self:
        """These outputs alone; memory is shared where it can be."""

    @abstractmethod
    def input_part(self, inputs: slice) -> Self:
        """These inputs alone, without the bias: one of the terms of a sum over ranks."""

    @abstractmethod
    def restored(self) -> nn.Module:
        """A plain linear layer of the numbers that these weights stand for, in the type of activations."""


class StoredExperts(nn.Module, ABC):
    """Experts that keep their weights as a method stores them; they stand in place of transformers' own."""

    num_experts: int

    @abstractmethod
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (T, K), choices (T, C) and their weights -> (T, K)."""

    @abstractmethod
    def part(self, experts: slice) -> Self:
        """These experts alone, numbered from zero."""

    @abstractmethod
    def restored(self) -> nn.Module:
        """transformers' own experts, with the numbers that these weights stand for."""


def same_form(layers: Sequence[Any]) -> bool:
    """True if these are linear layers of one kind and of as many inputs, so that they can be joined."""
    kinds = {(type(layer), getattr(layer, "in_features", None)) for layer in layers}
    return len(kinds) == 1 and all(type(layer) is nn.Linear or isinstance(layer, StoredLinear) for layer in layers)


def join(layers: Sequence[Any]) -> nn.Module:
    """Linear layers of one form and input as one, the outputs one after the other."""
    first = layers[0]
    if isinstance(first, StoredLinear):
        return type(first).joined(layers)
    bias = joined_bias(layers)
    return plain(torch.cat([layer.weight.data for layer in layers]), bias)


def joined_bias(layers: Sequence[Any]) -> Tensor | None:
    """The biases of several layers one after the other, zeros where a layer has none; None if none has one."""
    if all(layer.bias is None for layer in layers):
        return None
    filled = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers]
    return torch.cat(filled)


def part(layer: Any, outputs: slice) -> nn.Module:
    """Some outputs of a linear layer, sharing its memory."""
    if isinstance(layer, StoredLinear):
        return layer.part(outputs)
    return plain(layer.weight.data[outputs], None if layer.bias is None else layer.bias.data[outputs])


def input_part(layer: Any, inputs: slice) -> nn.Module:
    """Some inputs of a linear layer, without its bias, sharing its memory."""
    return layer.input_part(inputs) if isinstance(layer, StoredLinear) else plain(layer.weight.data[:, inputs], None)


def units_of(layer: Any) -> ShardUnits:
    """In which units a linear layer can be sharded."""
    return layer.units if isinstance(layer, StoredLinear) else ShardUnits()


def plain(weight_NK: Tensor, bias_N: Tensor | None) -> nn.Linear:
    """A linear layer with this weight and bias, which it shares."""
    linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    if bias_N is not None:
        linear.bias = nn.Parameter(bias_N, requires_grad=False)
    return linear
