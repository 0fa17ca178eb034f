"""FP8 weights made at load on a GPU that multiplies FP8; see float8.py for the products.

    W = s_W q_W        q_W in FP8 (float8_e4m3fn), one s_W for each output: its largest weight becomes 448

Activations are rounded to FP8 with one scale for each token. On a CPU the same weights are dequantized in each product;
see coded.py.

Shapes: G experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from beheld.platform.registry import platform_of
from beheld.quant import coded
from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.float8 import ALIGNED, FP8, Float8Experts, Float8Linear, rounded_rows
from beheld.quant.grouped import check_greatest
from beheld.quant.linear import bias_of
from beheld.quant.listed_experts import EXPERTS
from beheld.quant.method import StorageTarget

NAME = "fp8"
# Bytes of a scale, which is float32.
_SCALE_BYTES = 4


class Float8Rounding:
    """See Rounding: linear layers and experts of the text model, without the head."""

    name = NAME
    words = "FP8 with a scale for each output; activations are rounded to FP8 by token"
    takes_head, takes_experts = False, True
    at_once = 1

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether both sizes are multiples of what FP8 products require."""
        return outputs % ALIGNED == 0 and inputs % ALIGNED == 0

    def group(self, inputs: int) -> None:
        """Return None: an output has one scale."""

    def linear(self, linear: nn.Linear, head: bool, alone: bool = True) -> Float8Linear:
        """Round the weights of a linear layer."""
        return Float8Linear(*_rounded(linear.weight.data), bias_of(linear), linear.weight.dtype)

    def experts(self, experts: Any) -> Float8Experts:
        """Round the weights of experts, one expert at a time; `experts` loses them."""
        found: list[tuple[Tensor, Tensor]] = []
        dtype = getattr(experts, EXPERTS[0]).dtype
        for name in EXPERTS:
            weight_GNK = getattr(experts, name).data
            weight_GNK = weight_GNK.transpose(1, 2) if experts.is_transposed else weight_GNK
            rows_GNK = torch.empty(weight_GNK.shape, dtype=FP8, device=weight_GNK.device)
            scale_GN = torch.empty(weight_GNK.shape[:2], dtype=torch.float32, device=weight_GNK.device)
            for weight_NK, rows_NK, scale_N in zip(weight_GNK, rows_GNK, scale_GN, strict=True):
                rounded_NK, own_N = _rounded(weight_NK)
                rows_NK.copy_(rounded_NK)
                scale_N.copy_(own_N)
            found.append((rows_GNK, scale_GN))
            setattr(experts, name, None)
        return Float8Experts(experts, found[0], found[1], dtype)

    def kept_bytes(self, outputs: int, inputs: int, head: bool) -> int:
        """Return the bytes of a rounded weight."""
        return outputs * (inputs + _SCALE_BYTES)


def _rounded(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 (N, K) and scales (N,) of weights.

    Raises:
        ModelError: a weight is NaN or infinity, or comes near it.
    """
    least, greatest = weight_NK.aminmax()
    check_greatest(torch.stack([-least, greatest]))
    return rounded_rows(weight_NK)


def make(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    """Return the method; see quant/method.py."""
    if platform_of(target.device).shares_host_memory:
        return coded.make_fp8(stated, target)
    return RoundedAtLoad(Float8Rounding(), target.dtype, target.device)
