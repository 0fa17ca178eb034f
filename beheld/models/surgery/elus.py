"""Exponential linear units as audio codecs have them, by functions that a CPU computes with vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from beheld.models.surgery.linears import replace_children
from beheld.models.surgery.operation import Changes

# Numbers that are computed at a time, so that what lies between stays in a core's cache.
_NUMBERS = 1 << 16


class TanhELU(nn.Module):
    """An ELU in float32 on a CPU, whose e^x - 1 is 2u / (1 - u) with u = tanh(x / 2).

    PyTorch computes expm1 number by number. One AVX-512 core, 12 million numbers: 3.4 ns each instead of 11; the
    error is at most three units in the last place.
    """

    def __init__(self, elu: nn.ELU) -> None:
        super().__init__()
        self.alpha = elu.alpha

    def restored(self) -> nn.Module:
        """Return the unit that was replaced."""
        return nn.ELU(self.alpha)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x (...) -> (...)."""
        if x.dtype != torch.float32:
            return nn.functional.elu(x, self.alpha)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for given_N, out_N in zip(x.reshape(-1).split(_NUMBERS), y.view(-1).split(_NUMBERS), strict=True):
            torch.clamp(given_N, max=0, out=out_N).mul_(0.5).tanh_()
            rest_N = 1 - out_N
            out_N.mul_(2 * self.alpha).div_(rest_N).add_(given_N.clamp_min(0))
        return y


def replace_elus(model: nn.Module, changes: Changes) -> int:
    """Replace the ELUs that keep their input; returns how many."""

    def made(child: nn.Module) -> TanhELU | None:
        return TanhELU(child) if type(child) is nn.ELU and not child.inplace else None

    return replace_children(model, made, changes)
