"""Weights of few bits in groups: whole numbers, with one scale and one low for each group of an output's inputs.

A weight is low + scale q, with q from 0 to 2 ** bits - 1. All forms that checkpoints have are of this kind: with a zero
point z, low is -z scale.

Shapes: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.core.errors import ModelError

# Bits that numbers are kept in.
BITS = (4, 8)
# Inputs of a group are rounded in vectors of this many.
GROUP_UNIT = 16
# Longer groups are divided.
_LONGEST = 128
# Greater weights are NaN or infinity, or come near it.
_GREATEST = 1e18
# Numbers that are rounded at a time, so that the largest weight takes little memory beyond its own.
_CHUNK = 1 << 22
# A group whose weights are equal has this scale.
LEAST = 1e-30


@dataclass(frozen=True)
class GroupedForm:
    """The form of a weight; groups are runs of inputs of equal length.

    Attributes:
        bits: of a number, of BITS.
        inputs: K.
        groups: G.
    """

    bits: int
    inputs: int
    groups: int

    def layout(self) -> Sequence[tuple[torch.dtype, int]]:
        """Return the types and counts of the fields of an output: numbers, scales, lows; see row_bytes.py."""
        numbers = self.inputs * self.bits // 8
        return (torch.uint8, numbers), (torch.float32, self.groups), (torch.float32, self.groups)

    def kept_bytes(self, outputs: int) -> int:
        """Return the bytes in memory: scales and lows take two bytes, and each output has a factor and a bias."""
        return outputs * (self.inputs * self.bits // 8 + 4 * self.groups + 8)


def form_of(bits: int, inputs: int, groups: int) -> GroupedForm:
    """Return the form in which a weight is kept whose numbers have `bits`, in `groups` runs of equal length.

    Long groups are divided, because a group's activations share a step.
    """
    size = inputs // groups
    own = next((each for each in range(_LONGEST, 0, -GROUP_UNIT) if size % each == 0), size)
    return GroupedForm(kept_bits(bits), inputs, inputs // min(own, size))


def kept_bits(bits: int) -> int:
    """Return the bits in which numbers of `bits` are kept."""
    return min(each for each in BITS if each >= bits)


@dataclass(frozen=True)
class GroupedNumbers:
    """A weight's numbers.

    Attributes:
        numbers_NK: whole numbers in uint8.
        scale_NG, low_NG: float32.
        bits: in which numbers are kept.
        order_K: the inputs in the order of `numbers_NK`, where groups are no runs of inputs (act-order); None for the
            order in which they come.
    """

    numbers_NK: Tensor
    scale_NG: Tensor
    low_NG: Tensor
    bits: int
    order_K: Tensor | None = None

    @property
    def form(self) -> GroupedForm:
        """Return the form."""
        return GroupedForm(self.bits, self.numbers_NK.shape[1], self.scale_NG.shape[1])

    def dequantized(self) -> Tensor:
        """Return the weights in float32, (N, K), inputs in the order in which they come."""
        found_NK = self.numbers_NK.float()
        by_group = found_NK.unflatten(1, (self.scale_NG.shape[1], -1))
        by_group.mul_(self.scale_NG.unsqueeze(-1)).add_(self.low_NG.unsqueeze(-1))
        if self.order_K is None:
            return found_NK
        return found_NK[:, self.order_K.argsort()]

    def outputs_alone(self, outputs: slice) -> GroupedNumbers:
        """Return the numbers of these outputs."""
        return GroupedNumbers(
            self.numbers_NK[outputs], self.scale_NG[outputs], self.low_NG[outputs], self.bits, self.order_K
        )

    def fields(self) -> Sequence[Tensor]:
        """Return the fields of each output: (N, *), see GroupedForm.layout."""
        numbers = self.numbers_NK
        if self.bits == 4:
            numbers = numbers[:, ::2] | (numbers[:, 1::2] << 4)
        return numbers, self.scale_NG.float(), self.low_NG.float()

    @classmethod
    def of_fields(cls, fields: Sequence[Tensor], form: GroupedForm, order_K: Tensor | None) -> GroupedNumbers:
        """Return the numbers of fields (N, *)."""
        numbers, scale_NG, low_NG = fields
        if form.bits == 4:
            numbers = torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)
        return cls(numbers, scale_NG, low_NG, form.bits, order_K)


def concatenated(parts: Sequence[GroupedNumbers]) -> GroupedNumbers:
    """Return the numbers of all parts' outputs, in order; parts have one form and order of inputs."""
    numbers, scale, low = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("numbers_NK", "scale_NG", "low_NG")
    )
    return GroupedNumbers(numbers, scale, low, parts[0].bits, parts[0].order_K)


def affine(
    numbers_NK: Tensor, zeros_NG: Tensor | int, scales_NG: Tensor, bits: int, order_K: Tensor | None = None
) -> GroupedNumbers:
    """Return numbers with zero points: a weight is (number - zero point) * scale.

    Args:
        numbers_NK: uint8, inputs in the order in which they come.
        bits: of a number as stored.
        order_K: the inputs by group; None if groups are runs of them.
    """
    scale_NG = scales_NG.float().contiguous()
    low_NG = -(zeros_NG.float() if isinstance(zeros_NG, Tensor) else float(zeros_NG)) * scale_NG
    if order_K is not None:
        numbers_NK = numbers_NK[:, order_K]
    form = form_of(bits, numbers_NK.shape[1], scale_NG.shape[1])
    scale_NG, low_NG = (each.repeat_interleave(form.groups // each.shape[1], 1) for each in (scale_NG, low_NG))
    return GroupedNumbers(numbers_NK.contiguous(), scale_NG, low_NG, form.bits, order_K)


def check_greatest(greatest: Tensor) -> None:
    """Refuse weights by the greatest absolute values of their parts.

    Raises:
        ModelError: a weight is NaN or infinity, or comes near it.
    """
    if not float(greatest.amax()) < _GREATEST:
        raise ModelError(
            "Weights hold NaN or infinity, or come near it.",
            "Fetch the checkpoint again, or ask its publisher: no answer could be computed with them.",
        )


def rounded(weight_NK: Tensor, bits: int, group: int) -> GroupedNumbers:
    """Round weights, K a multiple of `group`; each group's least and greatest number stay what they are.

    Raises:
        ModelError: a weight is NaN or infinity, or comes near it.
    """
    rows = max(1, _CHUNK // weight_NK.shape[1])
    if weight_NK.shape[0] > rows:
        starts = range(0, weight_NK.shape[0], rows)
        return concatenated([rounded(weight_NK[start : start + rows], bits, group) for start in starts])
    exact = weight_NK.float().unflatten(1, (-1, group))
    low_NG1, high_NG1 = torch.aminmax(exact, dim=-1, keepdim=True)
    check_greatest(torch.maximum(high_NG1.abs(), low_NG1.abs()))
    scale_NG1 = (high_NG1 - low_NG1).div_((1 << bits) - 1).clamp_(min=LEAST)
    numbers = (exact - low_NG1).div_(scale_NG1).round_().clamp_(0, (1 << bits) - 1).to(torch.uint8)
    return GroupedNumbers(numbers.flatten(1), scale_NG1.squeeze(-1), low_NG1.squeeze(-1), bits)
