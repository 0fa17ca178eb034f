"""Triton kernels of 4-bit weights in groups: unpacked in registers, multiplied in 16 or 32 bits, summed in float32.

A weight is low + scale q. Weights lie in blocks of 16 outputs and 128 inputs, 1 KiB each, the blocks of 16 outputs one
after the other. A block has 16 numbers of 16 bits for each output, four weights each:

    number e of an output:   q(e) + 16 q(32 + e) + 256 q(64 + e) + 4096 q(96 + e)        e from 0 to 31

So two numbers, read as 32 bits, give two weights in the 16-bit halves of a register by one shift and one mask: what
tensor cores read, and the inputs that belong to them are neighbours. A few bits of a float's mantissa hold a weight, so
that no conversion is needed: bfloat16 128 + q has q in its last bits, as float16 1024 + q has.

A group's part of a product is scale sum((q - 8) x) + (low + 8 scale) sum(x); the second term is left out if all weights
are scale (q - 8). With few outputs, the inputs are split among programs, whose sums another kernel adds in order. A
single row has a kernel of its own (int4_row_kernel.py).

Shapes: T rows, N outputs, K inputs, G groups, C blocks of inputs, B blocks of outputs, P parts of the inputs, S groups
of a block (1, 2 or 4), E numbers of an output in a block.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.quant import int4_row_kernel
from beheld.quant.lanes_kernel import RowTiling

# A block's outputs and inputs.
BLOCK_OUTPUTS, BLOCK_INPUTS = 16, 128
# Numbers of 16 bits of a block.
_NUMBERS: tl.constexpr = tl.constexpr(512)
_MOST_PARTS = 16
# Triton's interpreter has no assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret


class Tiling(NamedTuple):
    """What a program of `_rows` computes.

    Attributes:
        rows, outputs: of its tile.
        warps, stages: of the program, and of its loads.
        programs: wanted for each multiprocessor; inputs are split to get them.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    programs: int


@triton.jit
def _centered(w, SHIFT: tl.constexpr, kind: tl.constexpr, ASM: tl.constexpr):
    """Return q - 8 of the four bits at SHIFT, in a type. ASM: two at a time, each of 16 bits."""
    if ASM and kind == tl.bfloat16:
        # 1.0, -136.0
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, a, b; shr.u32 t, $1, " + f"{SHIFT}" + "; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; "
            "mov.b32 a, 0x3F803F80; mov.b32 b, 0xC308C308; fma.rn.bf16x2 $0, t, a, b; }",
            "=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM and kind == tl.float16:
        # 1.0, -1032.0
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, a, b; shr.u32 t, $1, " + f"{SHIFT}" + "; lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA; "
            "mov.b32 a, 0x3C003C00; mov.b32 b, 0xE408E408; fma.rn.f16x2 $0, t, a, b; }",
            "=r,r", [w], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (((w >> SHIFT) & 15).to(tl.float32) - 8.0).to(kind)


@triton.jit
def _of_group(pointer, g, n_N, there_N, num_outputs, num_groups):
    return tl.load(pointer + g * num_outputs + n_N, mask=there_N & (g < num_groups), other=0.0)


@triton.jit
def _of_groups(pointer, c, n_N, there_N, num_outputs, num_groups, S: tl.constexpr):
    """Return one number for each output in each of a block's groups."""
    if S == 1:
        return (_of_group(pointer, c, n_N, there_N, num_outputs, num_groups),)
    elif S == 2:
        first = _of_group(pointer, 2 * c, n_N, there_N, num_outputs, num_groups)
        return first, _of_group(pointer, 2 * c + 1, n_N, there_N, num_outputs, num_groups)
    else:
        first = _of_group(pointer, 4 * c, n_N, there_N, num_outputs, num_groups)
        second = _of_group(pointer, 4 * c + 1, n_N, there_N, num_outputs, num_groups)
        third = _of_group(pointer, 4 * c + 2, n_N, there_N, num_outputs, num_groups)
        return first, second, third, _of_group(pointer, 4 * c + 3, n_N, there_N, num_outputs, num_groups)


@triton.jit
def _rows(
    x_ptr,
    weight_ptr,
    scale_ptr,
    low_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    num_groups,
    num_blocks,
    blocks_per_part,
    T: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """One program computes N outputs of T rows over a part of the inputs, into its part of y (P, T, N).

    The weights are the left operand: tensor cores read them from registers. WHOLE: inputs fill their blocks.
    """
    part = tl.program_id(2)
    t_T = tl.program_id(1) * T + tl.arange(0, T)
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    e_E = tl.arange(0, 32)
    there_T, there_N = t_T < num_rows, n_N < num_outputs
    start = part * blocks_per_part
    stop = tl.minimum(start + blocks_per_part, num_blocks)
    w_NE_ptr = weight_ptr + ((n_N // 16) * (num_blocks * _NUMBERS) + (n_N % 16) * 32)[:, None] + e_E[None, :]
    x_ET_ptr = x_ptr + t_T.to(tl.int64)[None, :] * num_inputs + e_E[:, None]
    kind = x_ptr.dtype.element_ty
    acc_NT = tl.zeros([N, T], tl.float32)
    next_scale = _of_groups(scale_ptr, start, n_N, there_N, num_outputs, num_groups, S)
    if low_ptr is not None:
        ones_NE = tl.full([N, 32], 1.0, kind)
        next_low = _of_groups(low_ptr, start, n_N, there_N, num_outputs, num_groups, S)
    for c in tl.range(start, stop, num_stages=STAGES):
        w_NE = tl.load(w_NE_ptr + c * _NUMBERS, mask=there_N[:, None], other=0)
        scales = next_scale
        next_scale = _of_groups(scale_ptr, c + 1, n_N, there_N, num_outputs, num_groups, S)
        if low_ptr is not None:
            lows = next_low
            next_low = _of_groups(low_ptr, c + 1, n_N, there_N, num_outputs, num_groups, S)
        for s in tl.static_range(S):
            sum_NT = tl.zeros([N, T], tl.float32)
            total_NT = tl.zeros([N, T], tl.float32)
            for i in tl.static_range(4 // S):
                from_k = c * 128 + (s * (4 // S) + i) * 32
                inside = there_T[None, :]
                if not WHOLE:
                    inside = inside & (from_k + e_E < num_inputs)[:, None]
                x_ET = tl.load(x_ET_ptr + from_k, mask=inside, other=0.0)
                q_NE = _centered(w_NE, 4 * (s * (4 // S) + i), kind, ASM)
                sum_NT = tl.dot(q_NE, x_ET, sum_NT, input_precision="ieee")
                if low_ptr is not None:
                    total_NT = tl.dot(ones_NE, x_ET, total_NT, input_precision="ieee")
            scale_N = scales[s].to(tl.float32)
            acc_NT += sum_NT * scale_N[:, None]
            if low_ptr is not None:
                acc_NT += total_NT * (lows[s].to(tl.float32) + 8.0 * scale_N)[:, None]
    if bias_ptr is not None:
        acc_NT += tl.load(bias_ptr + n_N, mask=there_N, other=0.0).to(tl.float32)[:, None]
    y_NT_ptr = y_ptr + (part.to(tl.int64) * num_rows + t_T)[None, :] * num_outputs + n_N[:, None]
    tl.store(y_NT_ptr, acc_NT.to(y_ptr.dtype.element_ty), mask=there_T[None, :] & there_N[:, None])


@triton.jit
def _added(
    parts_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_numbers,
    num_outputs,
    P: tl.constexpr,
    J: tl.constexpr,
):
    """One program adds J numbers of all parts."""
    j_J = tl.program_id(0) * J + tl.arange(0, J)
    inside_J = j_J < num_numbers
    sum_J = tl.zeros([J], tl.float32)
    for part in tl.static_range(P):
        sum_J += tl.load(parts_ptr + part * num_numbers + j_J, mask=inside_J, other=0.0)
    if bias_ptr is not None:
        sum_J += tl.load(bias_ptr + j_J % num_outputs, mask=inside_J, other=0.0).to(tl.float32)
    sum_J = sum_J.to(y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        sum_J = sum_J.to(tl.float32) + tl.load(residual_ptr + j_J, mask=inside_J, other=0.0).to(tl.float32)
    tl.store(y_ptr + j_J, sum_J.to(y_ptr.dtype.element_ty), mask=inside_J)


@triton.jit
def _dequantized(
    weight_ptr,
    scale_ptr,
    low_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    num_groups,
    num_blocks,
    C: tl.constexpr,
    S: tl.constexpr,
):
    """One program writes the weights of 16 outputs in C blocks."""
    n_16 = tl.program_id(0) * 16 + tl.arange(0, 16)
    c_C = tl.program_id(1) * C + tl.arange(0, C)
    e_E = tl.arange(0, 32)
    w_ptr = weight_ptr + (tl.program_id(0) * num_blocks + c_C)[:, None, None] * _NUMBERS
    w = tl.load(
        w_ptr + (n_16 % 16)[None, :, None] * 32 + e_E[None, None, :], mask=(c_C < num_blocks)[:, None, None], other=0
    )
    line_ptr = out_ptr + n_16.to(tl.int64)[None, :, None] * num_inputs
    for i in tl.static_range(4):
        g_C = c_C * S + i * S // 4
        g_ptr = g_C[:, None] * num_outputs + n_16[None, :]
        scale = tl.load(scale_ptr + g_ptr, mask=(g_C < num_groups)[:, None], other=0.0).to(tl.float32)[:, :, None]
        if low_ptr is None:
            low = -8.0 * scale
        else:
            low = tl.load(low_ptr + g_ptr, mask=(g_C < num_groups)[:, None], other=0.0).to(tl.float32)[:, :, None]
        k = (c_C * 128 + i * 32)[:, None, None] + e_E[None, None, :]
        found = ((w >> (4 * i)) & 15).to(tl.float32) * scale + low
        tl.store(line_ptr + k, found.to(out_ptr.dtype.element_ty), mask=k < num_inputs)


def product(
    x_TK: Tensor,
    weight_NX: Tensor,
    scale_GN: Tensor,
    low_GN: Tensor | None,
    bias_N: Tensor | None,
    y_TN: Tensor,
    multiprocessors: int,
    *,
    early: bool = False,
    residual_TN: Tensor | None = None,
    tiling: Tiling | RowTiling | None = None,
) -> None:
    """Fill `y_TN` with x W^T + bias (+ residual).

    Args:
        x_TK: contiguous; of one row also at an even number of numbers from its storage's start.
        weight_NX: numbers of 32 bits, (N, 16 C), see the figure above.
        low_GN: None if each is -8 times its scale.
        multiprocessors: of the GPU.
        early: start before the previous kernel ends, if there is one row; only if the hardware can.
        tiling: in place of what is chosen for the shape.
    """
    (rows, inputs), (outputs, words), groups = x_TK.shape, weight_NX.shape, scale_GN.shape[0]
    if not rows:
        return
    blocks = words // 16
    # The numbers of a block's groups; a whole block is one group or more.
    split = triton.next_power_of_2(triton.cdiv(groups * BLOCK_INPUTS, inputs))
    if rows == 1 and x_TK.element_size() == 2 and not isinstance(tiling, Tiling):
        given = x_TK, weight_NX, scale_GN, low_GN, bias_N, residual_TN, y_TN
        int4_row_kernel.row(*given, split=split, early=early, tiling=tiling)
        return
    assert not isinstance(tiling, RowTiling)
    tiling = tiling or _tiling(rows, low_GN is None)
    columns, tiles = triton.cdiv(outputs, tiling.outputs), triton.cdiv(rows, tiling.rows)
    parts = max(1, min(_MOST_PARTS, round(tiling.programs * multiprocessors / (columns * tiles)), blocks // 3))
    per_part = triton.cdiv(blocks, parts)
    parts = triton.cdiv(blocks, per_part)
    out = y_TN if parts == 1 else x_TK.new_empty((parts, rows, outputs), dtype=torch.float32)
    _rows[(columns, tiles, parts)](
        x_TK, weight_NX.view(torch.int16), scale_GN, low_GN, bias_N if parts == 1 else None, out, rows, outputs, inputs,
        groups, blocks, per_part, tiling.rows, tiling.outputs, split, tiling.stages, inputs % BLOCK_INPUTS == 0,
        _ASSEMBLY, num_warps=tiling.warps, enable_fp_fusion=True,
    )  # fmt: skip
    if parts == 1 and residual_TN is not None:
        y_TN.add_(residual_TN)
    if parts > 1:
        size = 512
        _added[(triton.cdiv(rows * outputs, size),)](
            out, bias_N, residual_TN, y_TN, rows * outputs, outputs, parts, size,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def dequantized(weight_NX: Tensor, scale_GN: Tensor, low_GN: Tensor | None, out_NK: Tensor) -> None:
    """Fill `out_NK` with the weights, rounded to its type; others as in `product`."""
    (outputs, inputs), groups, blocks = out_NK.shape, scale_GN.shape[0], weight_NX.shape[1] // 16
    split = triton.next_power_of_2(triton.cdiv(groups * BLOCK_INPUTS, inputs))
    at_a_time = 2
    _dequantized[(outputs // BLOCK_OUTPUTS, triton.cdiv(blocks, at_a_time))](
        weight_NX.view(torch.int16), scale_GN, low_GN, out_NK, outputs, inputs, groups, blocks, at_a_time, split,
        num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip


# All measured on an H100 at the sizes of a 7B model's layers (docs/experiments/2026-11.md).
def _tiling(rows: int, centered: bool) -> Tiling:
    """Return how several rows are computed; `centered`: there are no lows."""
    if rows <= 16:
        return Tiling(8 if rows <= 8 else 16, 64, 2, 4, 4)
    tile = 32 if rows <= 32 else 64
    return Tiling(tile, 128, 8, 3, 2) if centered else Tiling(tile, 64, 4, 3, 4)
