"""int8 weights made at load, multiplied by activations in 8 bits. On a GPU int8_gpu.py multiplies them.

Where a CPU multiplies grouped weights as they are (grouped_linear.py), they have a scale for each group of inputs.
Elsewhere oneDNN multiplies them: x = step_T q_x and W = scale_N q_W with q in int8 from -127 to 127, one step per row
of x and one scale per output of W. Then x W^T = (q_x q_W^T) scale_N step_T, where the sums are of whole numbers and
exact. So a row's result has the same bits alone and among others, whatever the kernel.

oneDNN multiplies unsigned activations: q_x + 128, with the zero point 128.

Shapes: T rows of x, K inputs, N outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from beheld.platform.registry import platform_of
from beheld.quant import byte_products, int8_gpu
from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.grouped import GroupedForm, check_greatest
from beheld.quant.grouped_linear import GroupedLinear, fitting_group
from beheld.quant.int8_gpu import Int8GPULinear
from beheld.quant.linear import StoredExperts, StoredLinear, bias_of, joined_bias
from beheld.quant.listed_experts import ListedExperts
from beheld.quant.method import StorageTarget
from beheld.quant.row_counts import padded_rows
from beheld.utils.log import get_logger, once

logger = get_logger(__name__)

NAME = "int8"
# Inputs that share a scale, if weights are grouped.
_GROUP = 128
MOST = 127.0
_ZERO = 128
# A row of zeros has this step, and so has a weight's output of zeros.
_LEAST = 1e-30
# Numbers that are rounded at a time, so that the largest weight takes little memory beyond its own.
_CHUNK = 1 << 22


def rounded_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers plus 128 in uint8 (T, K), and steps in float32 (T, 1); each row's largest becomes 127."""
    exact_TK = x_TK.float()
    step_T1 = exact_TK.abs().amax(-1, keepdim=True).clamp_(min=_LEAST).div_(MOST)
    # Conversions to int8 are vectorized, those to uint8 are not.
    whole_TK = (exact_TK / step_T1).round_().to(torch.int8)
    # The highest bit turned over adds 128.
    return whole_TK.view(torch.uint8).bitwise_xor_(_ZERO), step_T1


def rounded_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers in int8 (N, K) and scales in float32 (N,); each output's largest becomes 127.

    Raises:
        ModelError: a weight is NaN or infinity, or comes near it.
    """
    rows_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=weight_NK.device)
    scale_N = torch.empty(weight_NK.shape[0], device=weight_NK.device)
    step = max(1, _CHUNK // weight_NK.shape[1])
    for start in range(0, weight_NK.shape[0], step):
        exact_MK = weight_NK[start : start + step].float()
        largest_M = exact_MK.abs().amax(1)
        check_greatest(largest_M)
        scale_M = largest_M.clamp_(min=_LEAST).div_(MOST)
        rows_NK[start : start + step] = (exact_MK / scale_M.unsqueeze(1)).round_().to(torch.int8)
        scale_N[start : start + step] = scale_M
    return rows_NK, scale_N


class Int8Linear(StoredLinear):
    """A linear layer with int8 weights in oneDNN's order, which rounds its input to 8 bits by row.

    Attributes:
        scale_N: each output's scale.
        packed_bytes: the bytes of the weights.
    """

    cuts_in_place: ClassVar[bool] = False

    def __init__(self, rows_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(rows_NK.shape, bias_N, dtype)
        self.scale_N = nn.Parameter(scale_N, requires_grad=False)
        self.packed_bytes = rows_NK.numel()
        self._packed = torch.ops.onednn.qlinear_prepack(rows_NK.contiguous(), None)
        self._zero_N = torch.zeros(self.out_features, dtype=torch.int32)

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """Round the weights of a plain linear layer."""
        rows_NK, scale_N = rounded_weight(linear.weight.data)
        return cls(rows_NK, scale_N, bias_of(linear), linear.weight.dtype)

    @property
    def rows_NK(self) -> Tensor:
        """Return the whole numbers, copied from oneDNN's order."""
        return self._packed.to_dense().t()

    @classmethod
    def joined(cls, layers: Sequence[Int8Linear]) -> Int8Linear:
        """Join several layers with the same input into one; exact, because each output keeps its scale."""
        rows_NK = torch.cat([layer.rows_NK for layer in layers])
        scale_N = torch.cat([layer.scale_N.data for layer in layers])
        return cls(rows_NK, scale_N, joined_bias(layers), layers[0].weight.dtype)

    def part(self, outputs: slice) -> Int8Linear:
        """Return a layer of these outputs alone."""
        rows_NK, scale_N = self.rows_NK[outputs], self.scale_N.data[outputs]
        return Int8Linear(rows_NK, scale_N, bias_of(self, outputs), self.weight.dtype)

    def dequantized(self) -> Tensor:
        """Return the weights, (N, K)."""
        return self.rows_NK.float() * self.scale_N.data.unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        rows = x.numel() // self.in_features
        x_TK = x.reshape(rows, self.in_features)
        padded = padded_rows(rows)
        if padded != rows:
            x_TK = nn.functional.pad(x_TK, (0, 0, 0, padded - rows))
        if byte_products.rounds(self.in_features, x_TK.dtype):
            whole_TK, step_T1 = byte_products.rounded_rows(x_TK.contiguous())
        else:
            whole_TK, step_T1 = rounded_rows(x_TK)
        y_TN = torch.ops.onednn.qlinear_pointwise(
            whole_TK, 1.0, _ZERO, self._packed, self.scale_N, self._zero_N, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y_TN = y_TN.mul_(step_T1) if self.bias is None else torch.addcmul(self.bias.float(), y_TN, step_T1)
        y_TN = y_TN if padded == rows else y_TN[:rows]
        return y_TN.to(x.dtype).view(*x.shape[:-1], self.out_features)


class Int8Experts(ListedExperts):
    """int8 experts in place of transformers' experts."""

    @classmethod
    def of(cls, experts: Any) -> Int8Experts:
        """Round the weights of transformers' experts, one expert at a time; `experts` loses them."""
        return cls.made(experts, Int8Linear.of)


class Int8Rounding:
    """See Rounding: linear layers and experts, and the head.

    Args:
        grouped: whether the CPU multiplies grouped weights as they are, which takes half the time of oneDNN's product
            for a row, and rounds less: a scale for each group of inputs, not for each output.
    """

    name = NAME
    takes_head = takes_experts = True

    def __init__(self, grouped: bool) -> None:
        self._grouped = grouped
        self.at_once = torch.get_num_threads() if grouped else 1
        self.words = (
            f"int8 in groups of up to {_GROUP} inputs; activations are rounded to 8 bits by row and group"
            if grouped
            else "int8; activations are rounded to 8 bits by row"
        )

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return True: layers of any size can be rounded."""
        return True

    def linear(self, linear: nn.Linear, head: bool, alone: bool = True) -> StoredLinear:
        """Round the weights of a linear layer."""
        group = self.group(linear.in_features)
        return Int8Linear.of(linear) if group is None else GroupedLinear.of(linear, 8, group, alone)

    def experts(self, experts: Any) -> Int8Experts:
        """Round the weights of experts, which lose them."""
        return Int8Experts.made(experts, lambda linear: self.linear(linear, head=False))

    def kept_bytes(self, outputs: int, inputs: int, head: bool) -> int:
        """Return the bytes of a rounded weight: a byte for each number, and scales."""
        group = self.group(inputs)
        return outputs * (inputs + 4) if group is None else GroupedForm(8, inputs, inputs // group).kept_bytes(outputs)

    def group(self, inputs: int) -> int | None:
        """Return how many inputs share a scale; None if all do."""
        return fitting_group(inputs, _GROUP) if self._grouped else None


class Int8GPURounding:
    """See Rounding: linear layers of the text model, without the head."""

    name = NAME
    words = "int8 with a scale for each output; activations are rounded to int8 by token"
    takes_head = takes_experts = False
    at_once = 1

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether the kernels multiply weights of these sizes."""
        return int8_gpu.fits(outputs, inputs)

    def group(self, inputs: int) -> None:
        """Return None: an output has one scale."""

    def linear(self, linear: nn.Linear, head: bool, alone: bool = True) -> Int8GPULinear:
        """Round the weights of a linear layer."""
        return Int8GPULinear(*rounded_weight(linear.weight.data), bias_of(linear), linear.weight.dtype)

    def experts(self, experts: Any) -> StoredExperts:
        """Never called: experts are not rounded."""
        raise NotImplementedError

    def kept_bytes(self, outputs: int, inputs: int, head: bool) -> int:
        """Return the bytes of a rounded weight."""
        return int8_gpu.kept_bytes(outputs, inputs)


def make(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    """Return the method; see quant/method.py."""
    if not platform_of(target.device).shares_host_memory:
        return RoundedAtLoad(Int8GPURounding(), target.dtype, target.device)
    missing = platform_of(target.device).no_grouped_products
    if missing is not None:
        once(logger, logging.WARNING, f"int8 products are oneDNN's, which take twice as long: {missing}.")
    return RoundedAtLoad(Int8Rounding(missing is None), target.dtype)
