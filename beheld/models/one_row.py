"""Linear layers of a single row on an NVIDIA GPU, where reading the weights once takes all the time.

A library's matrix product reaches two thirds of the memory bandwidth for one row (measured on an H200, 2048 x 2048: 6.3
microseconds where reading takes 1.9). Here each program reads the weights of single outputs. On Hopper and later it
starts reading them before the previous kernel ends, because no kernel writes weights.

Shapes: N outputs, K inputs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from beheld.platform import operators
from beheld.platform.registry import platform_of
from beheld.quant.float8 import FP8, Float8Linear
from beheld.quant.linear import bias_of


@functools.cache
def early_start(device: torch.device) -> bool:
    """Return whether a kernel may start before the previous one ends (Hopper and later)."""
    return platform_of(device).kernel_facts(device).early_launch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (..., K) -> (..., N) as torch's linear does, a single row by the kernel described above.

    Under torch.compile the choice is made at compile time: one row and several rows compile separately anyway.
    """
    # Asked last, and only for a single row: the compiler checks at each call what it evaluates here.
    fits = x.numel() == x.shape[-1] and x.element_size() == 2 and weight.is_contiguous()
    if fits and platform_of(x.device).one_row_kernels:
        out: Tensor = torch.ops.beheld.one_row_linear(x, weight, bias)
        return out
    return nn.functional.linear(x, weight, bias)


@runtime_checkable
class AddingLinear(Protocol):
    """A linear layer that adds a row to its product in the same launch."""

    def added(self, x_K: Tensor, residual_N: Tensor) -> Tensor:
        """Return residual + product, (N,), of one row on a GPU."""


class StandIn(nn.Module):
    """A replacement of a linear layer that shares its weights; subclasses compute."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def restored(self) -> nn.Linear:
        """Return a plain linear layer with the same weights."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear


class OneRowLinear(StandIn):
    """Computes a single row on a GPU by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        return linear(x, self.weight, self.bias)

    def added(self, x_K: Tensor, residual_N: Tensor) -> Tensor:
        """Return residual + product, (N,), of one row on a GPU, in one launch."""
        from beheld.models.one_row_kernel import one_row

        return one_row(x_K, self.weight, self.bias, early=early_start(x_K.device), residual_N=residual_N)


class OneRowFloat8Linear(Float8Linear):
    """Computes a single row on a GPU by kernels that round it and multiply; see quant/float8_row_kernel.py."""

    @classmethod
    def of(cls, layer: Float8Linear) -> OneRowFloat8Linear:
        """Return one with the same weights, sharing memory."""
        return cls(layer.rows_NK.data, layer.scale_N.data, bias_of(layer), layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        if x.numel() == self.in_features and x.element_size() == 2 and platform_of(x.device).one_row_kernels:
            out: Tensor = torch.ops.beheld.one_row_float8_linear(x, self.rows_NK, self.scale_N, self.bias)
            return out
        return super().forward(x)

    def added(self, x_K: Tensor, residual_N: Tensor) -> Tensor:
        """Return residual + product, (N,), of one row on a GPU, in one launch after that which rounds the row."""
        return _one_row_float8(x_K, self.rows_NK, self.scale_N, self.bias, residual_N)


def one_row_form(layer: Any) -> nn.Module | None:
    """Return a stored layer with a kernel for a single row in addition, sharing memory; None if there is none."""
    return OneRowFloat8Linear.of(layer) if type(layer) is Float8Linear else None


def _one_row(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    from beheld.models.one_row_kernel import one_row

    # A view of one row may be strided, and so may a bias cut from a larger tensor.
    x_K, bias_N = x.reshape(-1).contiguous(), None if bias_N is None else bias_N.contiguous()
    y_N = one_row(x_K, weight_NK, bias_N, early=early_start(x.device))
    return y_N.view(*x.shape[:-1], -1)


def _one_row_shape(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], weight_NK.shape[0]))


def _one_row_float8(
    x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, residual_N: Tensor | None = None
) -> Tensor:
    from beheld.quant import float8_kernel, float8_row_kernel

    x_1K, bias_N = x.reshape(1, -1).contiguous(), None if bias_N is None else bias_N.contiguous()
    early = early_start(x.device)
    rounded_1K = torch.empty(x_1K.shape, dtype=FP8, device=x.device)
    x_scale_1 = torch.empty(1, dtype=torch.float32, device=x.device)
    float8_kernel.rounded_rows(x_1K, rounded_1K, x_scale_1, early=early)
    y_N = x.new_empty(weight_NK.shape[0])
    float8_row_kernel.row(rounded_1K, x_scale_1, weight_NK, scale_N, bias_N, residual_N, y_N, early=early)
    return y_N.view(*x.shape[:-1], -1)


def _one_row_float8_shape(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], weight_NK.shape[0]))


operators.register("one_row_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _one_row, _one_row_shape)
operators.register(
    "one_row_float8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    _one_row_float8,
    _one_row_float8_shape,
)
