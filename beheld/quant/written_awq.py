"""Weights rounded to four bits with zero points, and written in AWQ's GEMM layout; awq.py reads them.

A group's scale and zero point are those, of a few ranges within that of its weights, whose squared error is least.
Before they are rounded, weights of inputs that are large on average are multiplied by a number above one, by which what
makes these inputs is divided: they then lose less (AWQ, arXiv 2306.00978).

Shapes: N outputs, K inputs, G groups of inputs, T rows of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import ModelError
from beheld.quant.awq import BITS, METHOD, ORDER, PER_WORD
from beheld.quant.grouped import check_greatest
from beheld.quant.integers import packed
from beheld.quant.written import largest_group

# Shares of the range of a group's weights.
_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
# Exponents of the inputs' average size, from 0 (no scale) to 1.
_EXPONENTS = 20
_LEAST_INPUT = 1e-4
# The range of scales in float16.
_LEAST, _MOST = 6e-8, 65504.0
# Weights that are rounded at a time.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class AWQForm:
    """How weights are written.

    Attributes:
        group: inputs that share a scale.
    """

    group: int

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether a weight can be written so."""
        return inputs % self.group == 0 and outputs % PER_WORD == 0

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config of a checkpoint; `ignored` names linear layers that stay as they are."""
        return {
            "quant_method": METHOD,
            "bits": BITS,
            "group_size": self.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignored),
        }

    def entries(self, weight_NK: Tensor, moments_KK: Tensor | None) -> dict[str, Tensor]:
        """Return what is stored of a weight, by the end of the entry's name; second moments are of no use here.

        Raises:
            ModelError: a weight is NaN or infinity, or greater than float16 holds.
        """
        greatest = weight_NK.abs().amax()
        check_greatest(greatest)
        if float(greatest) > _MOST:
            raise ModelError(f"A weight is {float(greatest):g}, and AWQ's scales are float16.", "Use the method int4.")
        rows = max(1, _CHUNK // weight_NK.shape[1])
        parts = [self._rounded(part.float()) for part in weight_NK.split(rows)]
        numbers_NK, zeros_NG, scales_NG = (torch.cat(each) for each in zip(*parts, strict=True))
        return {
            "qweight": _words(numbers_NK.t()),
            "qzeros": _words(zeros_NG.t()),
            "scales": scales_NG.t().contiguous().to(torch.float16),
        }

    def nearest(self, weight_NK: Tensor) -> Tensor:
        """Return the numbers that rounded weights stand for, in float32."""
        numbers_NK, zeros_NG, scales_NG = self._rounded(weight_NK)
        by_group = numbers_NK.float().unflatten(1, (-1, self.group))
        return ((by_group - zeros_NG.unsqueeze(-1)) * scales_NG.unsqueeze(-1)).flatten(1)

    def _rounded(self, weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return whole numbers (N, K) and zero points (N, G) in uint8, and scales (N, G) as float16 holds them."""
        by_group = weight_NK.unflatten(1, (-1, self.group))
        low, high = (each.unsqueeze(-1) for each in torch.aminmax(by_group, dim=-1))
        # Zero is one of the numbers.
        low, high = low.clamp(max=0), high.clamp(min=0)
        best: tuple[Tensor, ...] | None = None
        for share in _SHRUNK:
            scale = ((high - low) * (share / ((1 << BITS) - 1))).clamp_(min=_LEAST).to(torch.float16).float()
            zero = (-low * share / scale).round_().clamp_(0, (1 << BITS) - 1)
            numbers = (by_group / scale).add_(zero).round_().clamp_(0, (1 << BITS) - 1)
            error = ((numbers - zero) * scale - by_group).square_().sum(-1, keepdim=True)
            found: tuple[Tensor, ...] = (error, numbers, zero, scale)
            if best is not None:
                better = error < best[0]
                found = tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))
            best = found
        assert best is not None
        _, numbers, zero, scale = best
        return numbers.flatten(1).to(torch.uint8), zero.squeeze(-1).to(torch.uint8), scale.squeeze(-1)


def _words(numbers: Tensor) -> Tensor:
    """Return the words of numbers (rows, outputs): eight outputs each, in AWQ's order."""
    return packed(numbers.unflatten(1, (-1, PER_WORD))[..., list(ORDER)].flatten(1), BITS)


def best_scales(form: AWQForm, weights: Sequence[Tensor], x_TK: Tensor, size_K: Tensor) -> Tensor:
    """Return what to multiply the weights' inputs by (K,): the power of `size_K` with the least error of products.

    Args:
        weights: (N, K) each, of all layers that are given these inputs.
        x_TK: some of the inputs.
        size_K: the mean absolute value of each input.
    """
    least_error, best_K = None, torch.ones_like(size_K)
    for step in range(_EXPONENTS):
        scale_K = size_K.clamp(min=_LEAST_INPUT).pow(step / (_EXPONENTS - 1))
        scale_K = scale_K / (scale_K.amax() * scale_K.amin()).sqrt()
        error = 0.0
        for weight_NK in weights:
            for part_NK in weight_NK.split(max(1, _CHUNK // weight_NK.shape[1])):
                lost_NK = form.nearest(part_NK * scale_K).div_(scale_K).sub_(part_NK)
                error += float((x_TK @ lost_NK.t()).square_().sum(dtype=torch.float64))
        if least_error is None or error < least_error:
            least_error, best_K = error, scale_K
    return best_K


def awq_form(inputs: Sequence[int]) -> AWQForm:
    """Return the form for layers with these inputs; see `largest_group`."""
    return AWQForm(largest_group(inputs))
