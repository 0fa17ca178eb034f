"""Linear layers with grouped weights of few bits on a CPU, multiplied as they are.

Shapes: N outputs, K inputs, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from beheld.platform import host
from beheld.platform.jit import ProgramStep
from beheld.quant.byte_products import PackedWeights
from beheld.quant.grouped import GROUP_UNIT, GroupedForm, GroupedNumbers, concatenated
from beheld.quant.linear import StoredLinear, bias_of, joined_bias

_MULTIPLIED = (torch.float32, torch.bfloat16)
# Bytes of a weight whose file's pages are given back on the way.
_LARGE = 32 << 20


class GroupedLinear(StoredLinear):
    """A linear layer that keeps its weights in groups of few bits and rounds its input to 8 bits by row and group.

    Attributes:
        packed_bytes: the bytes of the weights.
    """

    cuts_in_place: ClassVar[bool] = False

    def __init__(
        self,
        numbers: GroupedNumbers | PackedWeights,
        bias_N: Tensor | None,
        dtype: torch.dtype,
        order_K: Tensor | None = None,
    ) -> None:
        if isinstance(numbers, GroupedNumbers):
            order_K, numbers = numbers.order_K, _packed(numbers)
        super().__init__((numbers.outputs, numbers.inputs), bias_N, dtype)
        self.form = GroupedForm(numbers.bits, numbers.inputs, numbers.groups)
        self._order_K = order_K
        self._weights = numbers
        self._bias_of: Tensor | None = None
        self.packed_bytes = self._weights.num_bytes

    @classmethod
    def of(cls, linear: nn.Linear, bits: int, group: int, alone: bool = True) -> GroupedLinear:
        """Round the weights of a plain linear layer, in groups of this size; `alone`, all threads help."""
        weight_NK = linear.weight.data
        pages = host.FilePages() if weight_NK.nbytes > _LARGE else None

        lock = Lock()

        def read(piece: Tensor) -> None:
            if pages is not None:
                with lock:
                    pages.read(piece.data_ptr(), piece.nbytes)

        return cls(
            PackedWeights.rounded(weight_NK, bits, group, threads=None if alone else 1, read=read),
            bias_of(linear),
            linear.weight.dtype,
        )

    @property
    def numbers(self) -> GroupedNumbers:
        """Return the weights' numbers, copied."""
        return GroupedNumbers(*self._weights.unpacked(), self.form.bits, self._order_K)

    def joins(self, other: StoredLinear) -> bool:
        """Return whether the other layer has the same form and order of inputs."""
        if not isinstance(other, GroupedLinear) or other.form != self.form:
            return False
        mine, theirs = self._order_K, other._order_K
        return mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))

    @classmethod
    def joined(cls, layers: Sequence[GroupedLinear]) -> GroupedLinear:
        """Join several layers with the same input into one; exact, because each output keeps its scales."""
        bias, dtype, order_K = joined_bias(layers), layers[0].weight.dtype, layers[0]._order_K
        weights = [layer._weights for layer in layers]
        if PackedWeights.can_join(weights):
            outputs = sum(part.outputs for part in weights)
            return cls(PackedWeights.joined(weights, outputs), bias, dtype, order_K)
        return cls(concatenated([layer.numbers for layer in layers]), bias, dtype)

    def part(self, outputs: slice) -> GroupedLinear:
        """Return a layer of these outputs alone."""
        return GroupedLinear(self.numbers.outputs_alone(outputs), bias_of(self, outputs), self.weight.dtype)

    def dequantized(self) -> Tensor:
        """Return the weights, (N, K)."""
        return self.numbers.dequantized()

    @property
    def plain_order(self) -> bool:
        """Return whether inputs have their own order."""
        return self._order_K is None

    def use_pages(self) -> None:
        """See PackedWeights; before `steps`, which keep addresses."""
        self._weights.use_pages()

    def work_bytes(self, rows: int) -> int:
        """See PackedWeights."""
        return self._weights.work_bytes(rows)

    def steps(self, x: int, kind: str, y: int, work: int, capacity: int) -> tuple[Any, list[ProgramStep]]:
        """See PackedWeights; the layer's inputs have their own order."""
        assert self.plain_order, "nothing reorders them"
        self._bring_bias()
        return self._weights.steps(x, kind, y, work, capacity)

    def _bring_bias(self) -> None:
        if self._bias_of is not self.bias:
            # Joined layers come apart by losing a bias that only the joined one needed.
            self._weights.set_bias(bias_of(self))
            self._bias_of = self.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        self._bring_bias()
        x_TK = x.reshape(-1, self.in_features)
        if self._order_K is not None:
            x_TK = x_TK.index_select(1, self._order_K)
        taken = x_TK if x_TK.dtype in _MULTIPLIED else x_TK.float()
        y_TN = self._weights.product(taken.contiguous())
        return y_TN.to(x.dtype).view(*x.shape[:-1], self.out_features)


def _packed(numbers: GroupedNumbers) -> PackedWeights:
    return PackedWeights(numbers.numbers_NK, numbers.scale_NG, numbers.low_NG, numbers.bits)


def fitting_group(inputs: int, wanted: int) -> int | None:
    """Return the largest size of groups up to `wanted` that divides the inputs; None if there is none."""
    return next((size for size in range(wanted, 0, -GROUP_UNIT) if inputs % size == 0), None)
