"""What kernels of one row by tensor cores share: each lane of a warp keeps its own words, of a flat tensor of lanes.

Triton places element m of a flat tensor in lane m % 32 of a warp, which `LANE` checks.

Shapes: M lanes.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LANE = tl.constexpr(
    "{.reg .pred p; .reg .u32 l; mov.u32 l, %laneid; setp.ne.u32 p, l, $1; selp.f32 $0, 0f7fc00000, 0f00000000, p;}"
)
"""Instructions that give 0 where an element has the lane of its number, and NaN elsewhere."""


class RowTiling(NamedTuple):
    """What a program of a product of one row computes: blocks of inputs at a time, and its warps."""

    at_a_time: int
    warps: int


@triton.jit
def four(word_M4):
    """Return a word of each four."""
    even_M2, odd_M2 = tl.split(tl.reshape(word_M4, [word_M4.shape[0], 2, 2]))
    first_M, third_M = tl.split(even_M2)
    second_M, fourth_M = tl.split(odd_M2)
    return first_M, second_M, third_M, fourth_M


@triton.jit
def store_outputs(y_N, n_N, bias_ptr, residual_ptr, y_ptr):
    """Store outputs `n_N` of a row, with bias and residual where they are given; the residual after rounding."""
    if bias_ptr is not None:
        y_N += tl.load(bias_ptr + n_N).to(tl.float32)
    y_N = y_N.to(y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        y_N = y_N.to(tl.float32) + tl.load(residual_ptr + n_N).to(tl.float32)
    tl.store(y_ptr + n_N, y_N.to(y_ptr.dtype.element_ty))
