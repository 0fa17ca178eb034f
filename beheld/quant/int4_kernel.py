"""Triton kernels of 4-bit weights in groups: unpacked in registers, multiplied in 16 or 32 bits, summed in float32.

A weight is low + scale q. Weights lie in blocks of 16 outputs and 128 inputs, 1 KiB each, the blocks of 16 outputs one
after the other. A block has 16 numbers of 16 bits for each output, four weights each:

    number e of an output:   q(e) + 16 q(32 + e) + 256 q(64 + e) + 4096 q(96 + e)        e from 0 to 31

So two numbers, read as 32 bits, give two weights in the 16-bit halves of a register by one shift and one mask: what
tensor cores read, and the inputs that belong to them are neighbours. A few bits of a float's mantissa hold a weight, so
that no conversion is needed: bfloat16 128 + q has q in its last bits, as float16 1024 + q has.

A group's part of a product is scale sum((q - 8) x) + (low + 8 scale) sum(x); the second term is left out if all weights
are scale (q - 8). With few outputs, the inputs are split among programs, whose sums another kernel adds in order.

The kernels of one row start before the previous kernel ends, see models/one_row_kernel.py. Those of several rows do
not: waiting programs take places of multiprocessors unevenly, which cost a third of the speed.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# A block's outputs and inputs.
BLOCK_OUTPUTS, BLOCK_INPUTS = 16, 128
# Words of 32 bits of a block, and numbers of 16 bits.
_WORDS: tl.constexpr = tl.constexpr(256)
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


class RowTiling(NamedTuple):
    """What a program of `_one_row` computes: blocks of outputs; blocks of inputs at a time, warps, parts of inputs."""

    blocks: int
    at_a_time: int
    warps: int
    parts: int


@triton.jit
def _above_128(w, ASM: tl.constexpr):
    """Return 128 + q in float32 of q in bits 16 to 19."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F0000, 0x43000000, 0xEA;", "=f,r", [w], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return ((w & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _pair(x, BRAIN: tl.constexpr):
    """Return two numbers of 16 bits, side by side in one of 32, as float32. BRAIN: they are bfloat16, not float16."""
    if BRAIN:
        return (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
    else:
        first = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return first, ((x >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _one_row(
    x_ptr,
    weight_ptr,
    scale_ptr,
    low_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_outputs,
    num_inputs,
    num_groups,
    num_blocks,
    blocks_per_part,
    B: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    WHOLE: tl.constexpr,
    BRAIN: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes 16 B outputs of one row over a part of the inputs, C blocks at a time, without tensor cores.

    The next blocks load while the current ones are multiplied. x and the weights are read as numbers of 32 bits.
    WHOLE: inputs fill their blocks. EARLY: see models/one_row_kernel.py.
    """
    if EARLY:
        gdc_launch_dependents()
    part = tl.program_id(1)
    b_B = tl.program_id(0) * B + tl.arange(0, B)
    c_C = tl.arange(0, C)
    e_16 = tl.arange(0, 16)
    there_B = b_B < num_outputs // 16
    there_B11 = there_B[:, None, None]
    start = part * blocks_per_part
    stop = tl.minimum(start + blocks_per_part, num_blocks)
    w_ptr = weight_ptr + (b_B[:, None, None, None] * num_blocks + c_C[None, :, None, None]) * _WORDS
    w_ptr += e_16[None, None, :, None] * 16 + e_16[None, None, None, :]
    n_B116 = b_B[:, None, None] * 16 + e_16[None, None, :]
    next_w = tl.load(
        w_ptr + start * _WORDS, mask=there_B11[:, :, :, None] & (start + c_C < stop)[None, :, None, None], other=0
    )
    if EARLY:
        gdc_wait()
    acc_BC16 = tl.zeros([B, C, 16], tl.float32)
    for at in range(start, stop, C):
        w = next_w
        following_C = at + C + c_C
        next_w = tl.load(
            w_ptr + (at + C) * _WORDS,
            mask=there_B11[:, :, :, None] & (following_C < stop)[None, :, None, None],
            other=0,
        )
        block_C = at + c_C
        for s in tl.static_range(S):
            g_C = block_C * S + s
            inside = there_B11 & ((g_C < num_groups) & (block_C < stop))[None, :, None]
            g_ptr = g_C[None, :, None] * num_outputs + n_B116
            scale = tl.load(scale_ptr + g_ptr, mask=inside, other=0.0).to(tl.float32)
            # What is multiplied is 128 + q.
            if low_ptr is None:
                offset = -136.0 * scale
            else:
                offset = tl.load(low_ptr + g_ptr, mask=inside, other=0.0).to(tl.float32) - 128.0 * scale
            sum_BC = tl.zeros([B, C, 16, 16], tl.float32)
            total_C = tl.zeros([C, 16], tl.float32)
            for i in tl.static_range(4 // S):
                k_C16 = block_C[:, None] * 64 + (s * (4 // S) + i) * 16 + e_16[None, :]
                there = (block_C < stop)[:, None]
                if not WHOLE:
                    there = there & (2 * k_C16 < num_inputs)
                x = tl.load(x_ptr + k_C16, mask=there, other=0)
                early_C16, late_C16 = _pair(x, BRAIN)
                sum_BC += _above_128(w << (16 - 4 * (s * (4 // S) + i)), ASM) * early_C16[None, :, None, :]
                sum_BC += _above_128(w >> (4 * (s * (4 // S) + i)), ASM) * late_C16[None, :, None, :]
                total_C += early_C16 + late_C16
            acc_BC16 += scale * tl.sum(sum_BC, 3) + offset * tl.sum(total_C, 1)[None, :, None]
    y_B16 = tl.sum(acc_BC16, 1)
    n_B16 = b_B[:, None] * 16 + e_16[None, :]
    there_B1 = there_B[:, None]
    if bias_ptr is not None:
        y_B16 += tl.load(bias_ptr + n_B16, mask=there_B1, other=0.0).to(tl.float32)
    y_B16 = y_B16.to(y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        y_B16 = y_B16.to(tl.float32) + tl.load(residual_ptr + n_B16, mask=there_B1, other=0.0).to(tl.float32)
    tl.store(y_ptr + part * num_outputs + n_B16, y_B16.to(y_ptr.dtype.element_ty), mask=there_B1)


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

    The weights are the left operand: tensor cores read them from registers. WHOLE: see `_one_row`.
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
    EARLY: tl.constexpr,
):
    """One program adds J numbers of all parts.

    EARLY: see models/one_row_kernel.py; signals when it has waited, so that the next kernel's programs do not wait in
    the places of multiprocessors that the parts' programs need.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
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
    if tiling is None:
        one = rows == 1 and x_TK.element_size() == 2
        tiling = _row_tiling(outputs, blocks, multiprocessors) if one else _tiling(rows, low_GN is None)
    early = early and isinstance(tiling, RowTiling)
    options = {"launch_pdl": True} if early else {}
    sizes = outputs, inputs, groups, blocks
    # The numbers of a block's groups; a whole block is one group or more.
    split = triton.next_power_of_2(triton.cdiv(groups * BLOCK_INPUTS, inputs))
    whole = inputs % BLOCK_INPUTS == 0
    if isinstance(tiling, RowTiling):
        per_part = triton.cdiv(triton.cdiv(blocks, tiling.parts), tiling.at_a_time) * tiling.at_a_time
        parts = triton.cdiv(blocks, per_part)
        out = y_TN if parts == 1 else x_TK.new_empty((parts, outputs), dtype=torch.float32)
        late = (bias_N, residual_TN) if parts == 1 else (None, None)
        grid: tuple[int, ...] = triton.cdiv(outputs // BLOCK_OUTPUTS, tiling.blocks), parts
        _one_row[grid](
            x_TK.view(torch.int32), weight_NX, scale_GN, low_GN, *late, out, *sizes, per_part,
            tiling.blocks, tiling.at_a_time, split, whole, x_TK.dtype == torch.bfloat16, _ASSEMBLY, early,
            num_warps=tiling.warps, enable_fp_fusion=True, **options,
        )  # fmt: skip
    else:
        columns, tiles = triton.cdiv(outputs, tiling.outputs), triton.cdiv(rows, tiling.rows)
        parts = max(1, min(_MOST_PARTS, round(tiling.programs * multiprocessors / (columns * tiles)), blocks // 3))
        per_part = triton.cdiv(blocks, parts)
        parts = triton.cdiv(blocks, per_part)
        out = y_TN if parts == 1 else x_TK.new_empty((parts, rows, outputs), dtype=torch.float32)
        _rows[(columns, tiles, parts)](
            x_TK, weight_NX.view(torch.int16), scale_GN, low_GN, bias_N if parts == 1 else None, out, rows, *sizes,
            per_part, tiling.rows, tiling.outputs, split, tiling.stages, whole, _ASSEMBLY,
            num_warps=tiling.warps, enable_fp_fusion=True,
        )  # fmt: skip
    if parts == 1 and residual_TN is not None and isinstance(tiling, Tiling):
        y_TN.add_(residual_TN)
    if parts > 1:
        size = 512
        _added[(triton.cdiv(rows * outputs, size),)](
            out, bias_N, residual_TN, y_TN, rows * outputs, outputs, parts, size, early,
            num_warps=4, enable_fp_fusion=True, **options,
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
def _row_tiling(outputs: int, blocks: int, multiprocessors: int) -> RowTiling:
    """Return how one row is computed."""
    wanted = 4 * multiprocessors
    if outputs // (4 * BLOCK_OUTPUTS) >= wanted:
        return RowTiling(4, 4, 4, 1)
    programs = triton.cdiv(outputs, 2 * BLOCK_OUTPUTS)
    if blocks <= 32 and programs < multiprocessors:
        return RowTiling(1, 16, 8, 1)
    return RowTiling(2, 4, 4, max(1, min(4, round(wanted / programs))))


def _tiling(rows: int, centered: bool) -> Tiling:
    """Return how several rows are computed; `centered`: there are no lows."""
    if rows <= 16:
        return Tiling(8 if rows <= 8 else 16, 64, 2, 4, 4)
    tile = 32 if rows <= 32 else 64
    return Tiling(tile, 128, 8, 3, 2) if centered else Tiling(tile, 64, 4, 3, 4)
