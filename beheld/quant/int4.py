"""Weights of four bits made at load, in groups of 64 inputs; the head has eight bits.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.grouped import GroupedForm, GroupedNumbers, concatenated, rounded
from beheld.quant.grouped_linear import GroupedLinear, fitting_group
from beheld.quant.listed_experts import ListedExperts

NAME = "int4"
_GROUP = 64
_BITS, _HEAD_BITS = 4, 8
# Numbers that are rounded at a time, so that the largest weight takes little memory beyond its own.
_CHUNK = 1 << 22


class Int4Experts(ListedExperts):
    """Experts of four bits in place of transformers' experts."""


class Int4Rounding:
    """See Rounding."""

    name = NAME
    words = (
        f"int4 in groups of {_GROUP} with a scale and a low each, the head int8; activations are rounded to 8 bits by "
        "row and group"
    )

    def fits(self, inputs: int) -> bool:
        """Return whether the inputs can be divided into groups."""
        return fitting_group(inputs, _GROUP) is not None

    def linear(self, linear: nn.Linear, head: bool) -> GroupedLinear:
        """Round the weights of a linear layer."""
        numbers = _rounded(linear.weight.data, _HEAD_BITS if head else _BITS)
        return GroupedLinear(numbers, None if linear.bias is None else linear.bias.data, linear.weight.dtype)

    def experts(self, experts: Any) -> Int4Experts:
        """Round the weights of experts, which lose them."""
        return Int4Experts.made(experts, lambda linear: self.linear(linear, head=False))

    def kept_bytes(self, outputs: int, inputs: int, head: bool) -> int:
        """Return the bytes of a rounded weight."""
        group = fitting_group(inputs, _GROUP)
        assert group is not None, "what does not fit is not rounded"
        return GroupedForm(_HEAD_BITS if head else _BITS, inputs, inputs // group).kept_bytes(outputs)


def make(stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> RoundedAtLoad:
    """Return the method; see quant/method.py."""
    return RoundedAtLoad(Int4Rounding(), dtype)


def _rounded(weight_NK: Tensor, bits: int) -> GroupedNumbers:
    outputs, inputs = weight_NK.shape
    group = fitting_group(inputs, _GROUP)
    assert group is not None, "what does not fit is not rounded"
    rows = max(1, _CHUNK // inputs)
    starts = range(0, outputs, rows)
    return concatenated([rounded(weight_NK[start : start + rows], bits, group) for start in starts])
