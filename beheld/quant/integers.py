"""Whole numbers of few bits in words of 32, and the weights that they stand for.

A weight's number is (whole number - zero point) * scale, where a group of an output's inputs shares scale and zero
point.

Shapes: N outputs, K inputs, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Return the numbers, in uint8, that a stream of `bits` each holds along `dim` of int32 words, lowest bits first.

    Without gaps: with 3 bits, 32 numbers take three words, and two of them lie across an edge.
    """
    words = words.movedim(dim, -1)
    cycle = 32 // math.gcd(32, bits)
    per_cycle = bits * cycle // 32
    mask = (1 << bits) - 1
    found = torch.empty((*words.shape[:-1], words.shape[-1] * 32 // bits), dtype=torch.uint8, device=words.device)
    for place in range(cycle):
        word, shift = divmod(place * bits, 32)
        inside = min(bits, 32 - shift)
        # The shift copies the sign; the mask removes it.
        value = (words[..., word::per_cycle] >> shift) & ((1 << inside) - 1)
        if inside < bits:
            value |= (words[..., word + 1 :: per_cycle] << inside) & mask
        found[..., place::cycle] = value.to(torch.uint8)
    return found.movedim(-1, dim)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Return int32 words of numbers along the last dimension, lowest bits first; `bits` divides 32."""
    by_word = numbers.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    words = (by_word << (bits * torch.arange(32 // bits))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def reordered(numbers: Tensor, places: Sequence[int]) -> Tensor:
    """Return numbers along the last dimension in another order within each run of `len(places)`.

    Number i of a run becomes number places[i].
    """
    back = torch.tensor(places, device=numbers.device).argsort()
    return numbers.unflatten(-1, (-1, len(places)))[..., back].flatten(-2)


def dequantized(numbers_NK: Tensor, zeros_NG: Tensor | int, scales_NG: Tensor, group_of_K: Tensor | None) -> Tensor:
    """Return float32 weights (N, K).

    Args:
        group_of_K: each input's group; None if groups are runs of equal length.
    """
    weight_NK = numbers_NK.to(torch.float32, memory_format=torch.contiguous_format)
    scales_NG = scales_NG.float()
    zeros = zeros_NG.float() if isinstance(zeros_NG, Tensor) else zeros_NG
    if group_of_K is None:
        by_group = weight_NK.unflatten(1, (scales_NG.shape[1], -1))
        by_group.sub_(zeros.unsqueeze(-1) if isinstance(zeros, Tensor) else zeros).mul_(scales_NG.unsqueeze(-1))
        return weight_NK
    groups_K = group_of_K.long()
    weight_NK.sub_(zeros[:, groups_K] if isinstance(zeros, Tensor) else zeros)
    return weight_NK.mul_(scales_NG[:, groups_K])
