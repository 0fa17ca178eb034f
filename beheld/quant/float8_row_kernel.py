"""A Triton kernel of a single row times FP8 weights with a scale for each output, by tensor cores.

The row is rounded to FP8 first, by one program that starts early; see float8_kernel.py. Such a product spends its time
on widening weights: in float32 one takes two conversions and a sum, here half a conversion, because tensor cores
multiply in float16 (`mma.m16n8k16`), although all of their eight columns hold the same row. FP8 numbers and their
products are exact there, and sums are in float32.

Each lane reads 16 successive inputs of two outputs, eight apart, and of the row. A product takes one of their four
words each, so that no weight leaves its lane; that holds only if lane i has output i / 4 and inputs i % 4, as in
lanes_kernel.py.

Early starts are those of models/one_row_kernel.py.

Shapes: N outputs, K inputs, C blocks of 64 inputs, A of them at a time, M = 32 A lanes: a block, one of 8 outputs, and
one of 4 pieces.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.quant.lanes_kernel import LANE, RowTiling, four, store_outputs

# Triton's interpreter has no assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret
OUTPUTS = 16
"""Of a program; what the outputs are multiples of, as the inputs are."""
# From so many outputs on there are programs enough.
_MANY_OUTPUTS = 16384


def _instructions() -> str:
    """Return instructions that add the products of a lane's words.

    Operands: the sums of both outputs, the four words of the first output, of the second and of the row, and the sums
    so far.
    """
    made = ".reg .b16 low, high; .reg .b32 a0, a1, a2, a3, x0, x1; .reg .f32 y0, y1, none1, none3;"
    made += "mov.f32 y0, $14; mov.f32 y1, $15;"
    for word in range(4):
        # Rows 0 to 7 of the left operand are first outputs, rows 8 to 15 second ones; then the same of other inputs.
        for operand, halves in ((2 + word, ("a0", "a2")), (6 + word, ("a1", "a3")), (10 + word, ("x0", "x1"))):
            made += f"mov.b32 {{low, high}}, ${operand};"
            made += "".join(
                f"cvt.rn.f16x2.e4m3x2 {wide}, {half};" for wide, half in zip(halves, ("low", "high"), strict=True)
            )
        made += "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {y0, none1, y1, none3}, "
        made += "{a0, a1, a2, a3}, {x0, x1}, {y0, y0, y1, y1};"
    return "{" + made + "mov.f32 $0, y0; mov.f32 $1, y1;}"


_PRODUCTS = tl.constexpr(_instructions())
_OPERANDS = tl.constexpr(",".join(["=&f"] * 2 + ["r"] * 12 + ["f"] * 2))


@triton.jit
def _times(word_M, x_M):
    """Return the products of two words of FP8 numbers, added, without assembly."""
    sum_M = tl.zeros(word_M.shape, tl.float32)
    for i in tl.static_range(4):
        w_M = ((word_M >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        sum_M += w_M * ((x_M >> (8 * i)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return sum_M


@triton.jit
def _row(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_words,
    A: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes 16 outputs; the next blocks load while the current ones are multiplied.

    The row and the weights are read as words of 32 bits, `num_words` of an output.
    """
    if EARLY:
        gdc_launch_dependents()
    m_M = tl.arange(0, 32 * A)
    i_4 = tl.arange(0, 4)
    first = tl.program_id(0) * 16
    at_M = m_M // 32 * 16 + m_M % 4 * 4
    line_ptr = weight_ptr + ((first + m_M // 4 % 8).to(tl.int64) * num_words + at_M)[:, None] + i_4[None, :]
    later_ptr = line_ptr + num_words.to(tl.int64) * 8
    there_M1 = (at_M < num_words)[:, None]
    next_one_M4 = tl.load(line_ptr, mask=there_M1, other=0)
    next_two_M4 = tl.load(later_ptr, mask=there_M1, other=0)
    if EARLY:
        gdc_wait()
    if ASSEMBLY:
        one_M = tl.inline_asm_elementwise(LANE, "=f,r", [m_M % 32], dtype=tl.float32, is_pure=True, pack=1)
    else:
        one_M = tl.zeros([32 * A], tl.float32)
    two_M = one_M
    x_M4_ptr = x_ptr + at_M[:, None] + i_4[None, :]
    for at in range(0, num_words, 16 * A):
        a0, a1, a2, a3 = four(next_one_M4)
        b0, b1, b2, b3 = four(next_two_M4)
        x0, x1, x2, x3 = four(tl.load(x_M4_ptr + at, mask=(at + at_M < num_words)[:, None], other=0))
        there_M1 = (at + 16 * A + at_M < num_words)[:, None]
        next_one_M4 = tl.load(line_ptr + at + 16 * A, mask=there_M1, other=0)
        next_two_M4 = tl.load(later_ptr + at + 16 * A, mask=there_M1, other=0)
        if ASSEMBLY:
            one_M, two_M = tl.inline_asm_elementwise(
                _PRODUCTS,
                _OPERANDS,
                [a0, a1, a2, a3, b0, b1, b2, b3, x0, x1, x2, x3, one_M, two_M],
                dtype=(tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
        else:
            one_M += _times(a0, x0) + _times(a1, x1) + _times(a2, x2) + _times(a3, x3)
            two_M += _times(b0, x0) + _times(b1, x1) + _times(b2, x2) + _times(b3, x3)
    # A tensor core gives each of four lanes the sum of them all.
    x_scale = tl.load(x_scale_ptr) * (0.25 if ASSEMBLY else 1.0)
    n_8 = first + tl.arange(0, 8)
    for half in tl.static_range(2):
        y_M = two_M if half else one_M
        y_8 = tl.sum(tl.sum(tl.reshape(y_M, [A, 8, 4]), 2), 0) * (x_scale * tl.load(scale_ptr + n_8 + 8 * half))
        store_outputs(y_8, n_8 + 8 * half, bias_ptr, residual_ptr, y_ptr)


def row(
    x_K: Tensor,
    x_scale_1: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    residual_N: Tensor | None,
    y_N: Tensor,
    *,
    early: bool,
) -> None:
    """Fill `y_N` with x W^T + bias (+ residual); all contiguous, N and K multiples of 16.

    Args:
        x_K, x_scale_1: FP8, and float32; see float8.rounded_rows.
        early: start before the previous kernel ends; only if the hardware can.
    """
    outputs, inputs = weight_NK.shape
    assert outputs % OUTPUTS == 0 == inputs % OUTPUTS
    at_a_time, warps = _tiling(outputs)
    _row[(outputs // OUTPUTS,)](
        x_K.view(torch.int32), x_scale_1, weight_NK.view(torch.int32), scale_N, bias_N, residual_N, y_N, inputs // 4,
        at_a_time, _ASSEMBLY, early,
        num_warps=warps, enable_fp_fusion=True, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _tiling(outputs: int) -> RowTiling:
    """Return how so many outputs are computed."""
    # Measured on an H200 at the sizes of a 7B model's layers: docs/experiments/2026-11.md.
    return RowTiling(8, 8) if outputs >= _MANY_OUTPUTS else RowTiling(16, 16)
