"""Weights of four bits made at load, in groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from beheld.platform.registry import platform_of
from beheld.quant import int4_gpu
from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.grouped import GroupedForm
from beheld.quant.grouped_linear import GroupedLinear, fitting_group
from beheld.quant.int4_gpu import Int4GPULinear
from beheld.quant.linear import StoredLinear
from beheld.quant.listed_experts import ListedExperts
from beheld.quant.method import StorageTarget

NAME = "int4"
_GROUP = 64
_BITS, _HEAD_BITS = 4, 8


class Int4Experts(ListedExperts):
    """Experts of four bits in place of transformers' experts."""


class Int4Rounding:
    """See Rounding: on a CPU all of the text model, and the head in eight bits; on a GPU the linear layers."""

    name = NAME

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.takes_head = self.takes_experts = not on_gpu
        self.at_once = 1 if on_gpu else torch.get_num_threads()
        self.words = (
            "int4 in groups of up to 128 with a scale and a low each"
            if on_gpu
            else f"int4 in groups of up to {_GROUP} with a scale and a low each, the head int8; activations are "
            "rounded to 8 bits by row and group"
        )

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether the inputs can be divided into groups, and products accept them."""
        group = self.group(inputs)
        if group is None or not self._on_gpu:
            return group is not None
        return int4_gpu.fits(GroupedForm(_BITS, inputs, inputs // group), outputs)

    def linear(self, linear: nn.Linear, head: bool, alone: bool = True) -> StoredLinear:
        """Round the weights of a linear layer."""
        group = self.group(linear.in_features)
        assert group is not None, "what does not fit is not rounded"
        bits = _HEAD_BITS if head else _BITS
        return Int4GPULinear.of(linear, bits, group) if self._on_gpu else GroupedLinear.of(linear, bits, group, alone)

    def experts(self, experts: Any) -> Int4Experts:
        """Round the weights of experts, which lose them."""
        return Int4Experts.made(experts, lambda linear: self.linear(linear, head=False))

    def kept_bytes(self, outputs: int, inputs: int, head: bool) -> int:
        """Return the bytes of a rounded weight."""
        group = self.group(inputs)
        assert group is not None, "what does not fit is not rounded"
        return GroupedForm(_HEAD_BITS if head else _BITS, inputs, inputs // group).kept_bytes(outputs)

    def group(self, inputs: int) -> int | None:
        """Return how many inputs share a scale; None if all do."""
        if self._on_gpu:
            return next((size for size in reversed(int4_gpu.GROUPS) if inputs % size == 0), None)
        return fitting_group(inputs, _GROUP)


def make(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    """Return the method; see quant/method.py."""
    on_gpu = not platform_of(target.device).shares_host_memory
    return RoundedAtLoad(Int4Rounding(on_gpu), target.dtype, target.device if on_gpu else None)
