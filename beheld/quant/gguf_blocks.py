"""Blocks of GGUF files as grouped numbers: the types whose weights are low + scale q.

A block holds 32 inputs (256 for the types with _K) of an output. All begin or end with a scale d in float16:

    Q8_0   d | q 32 x int8
    Q4_0   d | q 16 bytes: input i in the lower half of byte i, input 16 + i in the upper     d (q - 8)
    Q4_1   d, low | q as Q4_0                                                                  d q + low
    Q5_0   d | a fifth bit of each, 4 bytes | q as Q4_0                                        d (q - 16)
    Q5_1   d, low | fifth bits | q as Q4_0                                                     d q + low
    Q4_K   d, e | s and m, 8 of 6 bits each, 12 bytes | q 128 bytes                            d s q - e m
    Q5_K   d, e | s and m | fifth bits, 32 bytes | q as Q4_K                                   d s q - e m
    Q6_K   lower 4 bits 128 bytes | upper 2 bits 64 bytes | s 16 x int8 | d                    d s (q - 32)

Q4_K has groups of 32 inputs: bytes 32 j to 32 j + 31 hold group 2 j in their lower halves and 2 j + 1 in their upper.
Q6_K has groups of 16.

Shapes: N outputs, B blocks of an output, G groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from beheld.quant.grouped import GroupedForm, GroupedNumbers

# Type -> bits in which numbers are kept, inputs of a group, and the function that reads blocks.
Read = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def form_of(kind: str, inputs: int) -> GroupedForm | None:
    """Return the form in which a tensor of this type is kept; None if it is dequantized."""
    if kind not in _KINDS:
        return None
    bits, group, _, _ = _KINDS[kind]
    return GroupedForm(bits, inputs, inputs // group)


def numbers_of(kind: str, raw_NX: Tensor) -> GroupedNumbers:
    """Return the numbers of a tensor's bytes, (N, bytes of an output)."""
    bits, _, block_bytes, read = _KINDS[kind]
    numbers, scale, low = read(raw_NX.unflatten(1, (-1, block_bytes)))
    return GroupedNumbers(
        numbers.flatten(1), scale.flatten(1).contiguous(), low.expand(scale.shape).flatten(1).contiguous(), bits
    )


def _float16(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte of each block, in float32, (N, B, 1)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _halves(bytes_: Tensor) -> Tensor:
    """Return the lower halves of bytes (..., X), then the upper ones: (..., 2 X)."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _fifth(blocks: Tensor, start: int) -> Tensor:
    """Return the fifth bits, 4 bytes from a byte of each block on, in their place: (N, B, 32)."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[..., start : start + 4].unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = _float16(blocks, 0)
    # From -128 to 127; the highest bit turned over adds 128.
    return blocks[..., 2:] ^ 128, d, -128 * d


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = _float16(blocks, 0)
    return _halves(blocks[..., 2:]), d, -8 * d


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _halves(blocks[..., 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    d = _float16(blocks, 0)
    return _halves(blocks[..., 6:]) | _fifth(blocks, 2), d, -16 * d


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _halves(blocks[..., 8:]) | _fifth(blocks, 4), _float16(blocks, 0), _float16(blocks, 2)


def _scales_and_lows(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and lows of a block of Q4_K or Q5_K: (N, B, 8) each."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    lows = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return _float16(blocks, 0) * scales, -_float16(blocks, 2) * lows


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (_halves(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), *_scales_and_lows(blocks))


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lower = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    # Bit g of byte i is that of input i of group g.
    groups = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    fifth = ((blocks[..., 16:48].unsqueeze(-2) >> groups) & 1) << 4
    return ((lower | fifth).flatten(-2), *_scales_and_lows(blocks))


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Halves of 128 inputs; in each, bytes i and 32 + i hold the lower bits of inputs i, 32 + i, 64 + i and 96 + i.
    lower = _halves(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(1)
    upper = ((blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3) << 4
    scales = _float16(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8)
    return (lower | upper).flatten(-3), scales, -32 * scales


_KINDS: dict[str, tuple[int, int, int, Read]] = {
    "Q8_0": (8, 32, 34, _q8_0),
    "Q4_0": (4, 32, 18, _q4_0),
    "Q4_1": (4, 32, 20, _q4_1),
    "Q5_0": (8, 32, 22, _q5_0),
    "Q5_1": (8, 32, 24, _q5_1),
    "Q4_K": (4, 32, 144, _q4_k),
    "Q5_K": (8, 32, 176, _q5_k),
    "Q6_K": (8, 16, 210, _q6_k),
}
KINDS: Sequence[str] = tuple(_KINDS)
"""The types that are kept."""
