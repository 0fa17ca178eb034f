"""Linear layers of a single row on an NVIDIA GPU: one request decoding reads every weight once, nothing else counts.

A library's matrix product reaches two thirds of the memory's speed for one row (measured on an H200, 2048 x 2048: 6.3
microseconds where reading takes 1.9). Here each program reads the weights of single outputs. On Hopper and later it
starts reading them before the kernel before it has ended, since weights wait for nobody.

Shapes: N outputs, K inputs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from beheld.platform.registry import platform_of


@functools.cache
def early_start(device: torch.device) -> bool:
    """True if a kernel may start there before the one before it has ended (Hopper and later)."""
    return platform_of(device).kernel_facts(device).early_launch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K) -> (..., N), as torch's own; a single row takes the way described above.

    Under a compiler the choice is made when compiling: one row and several are compiled apart anyway.
    """
    # Asked last, and only of a single row: what a compiler is told here it checks at each call.
    fits = x.numel() == x.shape[-1] and x.element_size() == 2 and weight.is_contiguous()
    if fits and platform_of(x.device).one_row_kernels:
        out: Tensor = torch.ops.beheld.one_row_linear(x, weight, bias)
        return out
    return nn.functional.linear(x, weight, bias)


class StandIn(nn.Module):
    """Stands where a linear layer stood, on its own weights; what computes on them is a subclass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def restored(self) -> nn.Linear:
        """A plain linear layer with the same weights."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear


class OneRowLinear(StandIn):
    """Of a single row on a GPU, the product of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)."""
        return linear(x, self.weight, self.bias)

    def added(self, x_K: Tensor, residual_N: Tensor) -> Tensor:
        """residual + product, (N,), of one row on a GPU, in one launch."""
        from beheld.models.one_row_kernel import one_row

        return one_row(x_K, self.weight, self.bias, early=early_start(x_K.device), residual_N=residual_N)


def _one_row(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    from beheld.models.one_row_kernel import one_row

    # A view of one row may be strided, and so may a bias that was cut out of something.
    x_K, bias_N = x.reshape(-1).contiguous(), None if bias_N is None else bias_N.contiguous()
    return one_row(x_K, weight_NK, bias_N, early=early_start(x.device)).view(*x.shape[:-1], -1)


def _one_row_shape(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """What a compiler needs to know of the result."""
    return x.new_empty((*x.shape[:-1], weight_NK.shape[0]))


_library = torch.library.Library("beheld", "FRAGMENT")
_library.define("one_row_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("one_row_linear", _one_row, "CompositeExplicitAutograd")
torch.library.register_fake("beheld::one_row_linear", _one_row_shape, lib=_library)
