"""Triton kernels of int8 weights with a scale for each output: activations rounded by row, sums of whole numbers.

    y = sum(q_x q_W) step scale + bias        q from -127 to 127 (weights of a checkpoint from -128); one step for each
                                              row, one scale for each output

Sums are int32 and exact, in any order. All kernels scale them by the same float32 operations in the same order, and
none is compiled with multiplications and additions fused. So a row's result has the same bits whichever kernel computes
it, and whatever other rows there are.

With few rows, weights are the first operand, outputs its rows: tensor cores take at least 64 of these, and as few as 8
of the other's. There are too few tiles of outputs then to read memory at full speed, so the inputs are split among
programs, whose sums another kernel adds. With many rows, a program computes tile after tile, which the hardware copies
by descriptors where it can.

Shapes: T rows, N outputs, K inputs, P parts of the inputs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.quant.float8_kernel import round_by_row

# The largest step count of a rounded number.
MOST: tl.constexpr = tl.constexpr(127.0)
# A row of smaller numbers, as one of zeros, is rounded in steps of this / 127.
_LEAST: tl.constexpr = tl.constexpr(1e-30)
# Added to a number of fewer than 22 bits, it rounds to a whole number, which the last bits of the sum then hold.
_WHOLE: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
_MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
# Tiles of rows whose weights successive programs share.
_NEAR = 8
_MOST_PARTS = 16
_PROGRAMS_PER_SM = 2
# A kernel's sum of a row's products fits int32 up to so many inputs, also with weights of -128.
MOST_INPUTS = 1 << 17


@dataclass(frozen=True)
class FewTiles:
    """The launch of a product of few rows.

    Attributes:
        outputs, rows, inputs: of a tile.
        warps, stages: of a program.
        parts: of the inputs.
    """

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1


@dataclass(frozen=True)
class ManyTiles:
    """The launch of a product of many rows.

    Attributes:
        rows, outputs, inputs: of a tile.
        warps, stages: of a program.
        copied: tiles are copied by descriptors, which the hardware must have; else by threads.
        programs: for each multiprocessor, which compute tile after tile; 0 for one of each tile.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    copied: bool = False
    programs: int = 0


@triton.jit
def _bits(x):
    """Return the bits of magnitudes: they order as the numbers do, and NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _step(largest_bits):
    """Return the step of a row whose largest magnitude has these bits; NaN if one of its numbers is NaN."""
    largest = largest_bits.to(tl.float32, bitcast=True)
    return tl.math.div_rn(tl.where(largest < _LEAST, _LEAST, largest), MOST)


@triton.jit
def _in_steps(x, inverse):
    """Return whole numbers, halves rounded to even."""
    sum = x * inverse + _WHOLE
    return (sum.to(tl.int32, bitcast=True) & 255).to(tl.uint8).to(tl.int8, bitcast=True)


@triton.jit
def scaled(sum, step, scale):
    """Return what sums of products stand for; all broadcast to one shape."""
    return sum.to(tl.float32) * step * scale


@triton.jit
def _rounded_rows(x_ptr, out_ptr, step_ptr, x_stride, num_inputs, K: tl.constexpr, EARLY: tl.constexpr):
    """One program rounds one row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, K)
    inside_K = k_K < num_inputs
    x_K = tl.load(x_ptr + row * x_stride + k_K, mask=inside_K, other=0.0).to(tl.float32)
    step = _step(tl.max(_bits(x_K), 0))
    tl.store(out_ptr + row * num_inputs + k_K, _in_steps(x_K, tl.math.div_rn(1.0, step)), mask=inside_K)
    tl.store(step_ptr + row, step)


@triton.jit
def _rounded_long_rows(x_ptr, out_ptr, step_ptr, x_stride, num_inputs, K: tl.constexpr):
    """One program rounds one row, K numbers at a time."""
    row = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, K)
    x_K_ptr = x_ptr + row * x_stride + k_K
    largest_K = tl.zeros([K], tl.int32)
    for at in range(0, num_inputs, K):
        x_K = tl.load(x_K_ptr + at, mask=at + k_K < num_inputs, other=0.0).to(tl.float32)
        largest_K = tl.maximum(largest_K, _bits(x_K))
    step = _step(tl.max(largest_K, 0))
    inverse = tl.math.div_rn(1.0, step)
    for at in range(0, num_inputs, K):
        inside_K = at + k_K < num_inputs
        x_K = tl.load(x_K_ptr + at, mask=inside_K, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * num_inputs + at + k_K, _in_steps(x_K, inverse), mask=inside_K)
    tl.store(step_ptr + row, step)


@triton.jit
def _few(
    x_ptr,
    step_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    inputs_per_part,
    N: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    NEAR: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program computes N outputs of T rows over one part of the inputs, into its part of y (P, T, N).

    A part of several, whose type is int32, is not scaled. WHOLE: tiles fill the inputs.
    """
    columns, tiles = tl.cdiv(num_outputs, N), tl.cdiv(num_rows, T)
    block = tl.program_id(0) // (NEAR * columns)
    height = tl.minimum(tiles - block * NEAR, NEAR)
    within = tl.program_id(0) % (NEAR * columns)
    t_T = (block * NEAR + within % height) * T + tl.arange(0, T)
    n_N = within // height * N + tl.arange(0, N)
    there_T, inside_N = t_T < num_rows, n_N < num_outputs
    # Rows and outputs beyond the end are read from its start and not written.
    row_T = tl.where(there_T, t_T, 0).to(tl.int64)
    line_N = tl.where(inside_N, n_N, 0).to(tl.int64)
    k_K = tl.arange(0, K)
    x_TK_ptr = x_ptr + row_T[:, None] * num_inputs + k_K[None, :]
    w_NK_ptr = weight_ptr + line_N[:, None] * num_inputs + k_K[None, :]
    part = tl.program_id(1)
    first = part * inputs_per_part
    acc_NT = tl.zeros([N, T], tl.int32)
    for at in range(first, tl.minimum(first + inputs_per_part, num_inputs), K):
        if WHOLE:
            w_NK, x_TK = tl.load(w_NK_ptr + at), tl.load(x_TK_ptr + at)
        else:
            left_1K = (at + k_K < num_inputs)[None, :]
            w_NK, x_TK = tl.load(w_NK_ptr + at, mask=left_1K, other=0), tl.load(x_TK_ptr + at, mask=left_1K, other=0)
        acc_NT = tl.dot(w_NK, tl.trans(x_TK), acc_NT)
    y_NT_ptr = y_ptr + (part.to(tl.int64) * num_rows + t_T)[None, :] * num_outputs + n_N[:, None]
    there_NT = there_T[None, :] & inside_N[:, None]
    if y_ptr.dtype.element_ty == tl.int32:
        tl.store(y_NT_ptr, acc_NT, mask=there_NT)
    else:
        y_NT = scaled(acc_NT, tl.load(step_ptr + row_T)[None, :], tl.load(scale_ptr + line_N)[:, None])
        if bias_ptr is not None:
            y_NT += tl.load(bias_ptr + line_N).to(tl.float32)[:, None]
        tl.store(y_NT_ptr, y_NT.to(y_ptr.dtype.element_ty), mask=there_NT)


@triton.jit
def _added(parts_ptr, step_ptr, scale_ptr, bias_ptr, y_ptr, num_rows, num_outputs, P: tl.constexpr, N: tl.constexpr):
    """One program adds and scales N numbers of a row in all parts."""
    row = tl.program_id(0).to(tl.int64)
    n_N = tl.program_id(1) * N + tl.arange(0, N)
    inside_N = n_N < num_outputs
    sum_N = tl.zeros([N], tl.int32)
    for part in tl.static_range(P):
        sum_N += tl.load(parts_ptr + (part * num_rows + row) * num_outputs + n_N, mask=inside_N, other=0)
    y_N = scaled(sum_N, tl.load(step_ptr + row), tl.load(scale_ptr + n_N, mask=inside_N, other=0.0))
    if bias_ptr is not None:
        y_N += tl.load(bias_ptr + n_N, mask=inside_N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * num_outputs + n_N, y_N.to(y_ptr.dtype.element_ty), mask=inside_N)


@triton.jit
def _many(
    x,
    step_ptr,
    weight,
    scale_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NEAR: tl.constexpr,
    COPIED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program computes tiles of T rows and N outputs, as many tiles apart as there are programs.

    Args:
        x, weight: descriptors if COPIED, else pointers.
    """
    columns, heights = tl.cdiv(num_outputs, N), tl.cdiv(num_rows, T)
    for tile in tl.range(tl.program_id(0), columns * heights, tl.num_programs(0), flatten=COPIED):
        # Successive tiles share weights of few columns, and rows of NEAR heights, which then stay in the cache.
        block = tile // (NEAR * columns)
        height = tl.minimum(heights - block * NEAR, NEAR)
        within = tile % (NEAR * columns)
        first_t, first_n = (block * NEAR + within % height) * T, within // height * N
        t_T, n_N = first_t + tl.arange(0, T), first_n + tl.arange(0, N)
        there_T, inside_N = t_T < num_rows, n_N < num_outputs
        row_T = tl.where(there_T, t_T, 0).to(tl.int64)
        line_N = tl.where(inside_N, n_N, 0).to(tl.int64)
        acc_TN = tl.zeros([T, N], tl.int32)
        if COPIED:
            for at in range(0, num_inputs, K):
                x_TK, w_NK = x.load([first_t, at]), weight.load([first_n, at])
                acc_TN = tl.dot(x_TK, tl.trans(w_NK), acc_TN)
        else:
            k_K = tl.arange(0, K)
            x_TK_ptr = x + row_T[:, None] * num_inputs + k_K[None, :]
            w_NK_ptr = weight + line_N[:, None] * num_inputs + k_K[None, :]
            for at in range(0, num_inputs, K):
                if WHOLE:
                    x_TK, w_NK = tl.load(x_TK_ptr + at), tl.load(w_NK_ptr + at)
                else:
                    left_1K = (at + k_K < num_inputs)[None, :]
                    x_TK = tl.load(x_TK_ptr + at, mask=left_1K, other=0)
                    w_NK = tl.load(w_NK_ptr + at, mask=left_1K, other=0)
                acc_TN = tl.dot(x_TK, tl.trans(w_NK), acc_TN)
        y_TN = scaled(acc_TN, tl.load(step_ptr + row_T)[:, None], tl.load(scale_ptr + line_N)[None, :])
        if bias_ptr is not None:
            y_TN += tl.load(bias_ptr + line_N).to(tl.float32)[None, :]
        y_TN_ptr = y_ptr + row_T[:, None] * num_outputs + n_N[None, :]
        tl.store(y_TN_ptr, y_TN.to(y_ptr.dtype.element_ty), mask=there_T[:, None] & inside_N[None, :])


def rounded_rows(x_TK: Tensor, out_TK: Tensor, step_T: Tensor, *, early: bool = False) -> None:
    """Fill `out_TK` (int8) and `step_T` (float32), whose product is x up to rounding; x may be strided by rows.

    Args:
        early: start before the previous kernel ends; only if the hardware can, and for a single row.
    """
    round_by_row(_rounded_rows, _rounded_long_rows, x_TK, out_TK, step_T, early=early, fused=False)


def few_rows(
    x_TK: Tensor,
    step_T: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    y_TN: Tensor,
    multiprocessors: int,
    tiles: FewTiles | None = None,
) -> None:
    """Fill `y_TN` with x W^T + bias, best of few rows.

    Args:
        x_TK, step_T: see `rounded_rows`; contiguous.
        multiprocessors: of the GPU.
        tiles: None to choose.
    """
    (rows, inputs), outputs = x_TK.shape, weight_NK.shape[0]
    if not rows:
        return
    made = few_tiles(rows, outputs, inputs, multiprocessors) if tiles is None else tiles
    blocks = triton.cdiv(inputs, made.inputs)
    per_part = triton.cdiv(blocks, made.parts)
    parts = triton.cdiv(blocks, per_part)
    out = y_TN if parts == 1 else x_TK.new_empty((parts, rows, outputs), dtype=torch.int32)
    _few[(triton.cdiv(outputs, made.outputs) * triton.cdiv(rows, made.rows), parts)](
        x_TK, step_T, weight_NK, scale_N, bias_N, out, rows, outputs, inputs, per_part * made.inputs,
        made.outputs, made.rows, made.inputs, _NEAR, inputs % made.inputs == 0,
        num_warps=made.warps, num_stages=made.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if parts > 1:
        add_parts(out, step_T, scale_N, bias_N, y_TN)


def add_parts(parts_PTN: Tensor, step_T: Tensor, scale_N: Tensor, bias_N: Tensor | None, y_TN: Tensor) -> None:
    """Fill `y_TN` with the scaled sum of parts (int32), plus bias."""
    parts, rows, outputs = parts_PTN.shape
    size = 1024
    _added[(rows, triton.cdiv(outputs, size))](
        parts_PTN, step_T, scale_N, bias_N, y_TN, rows, outputs, parts, size, num_warps=4, enable_fp_fusion=False
    )


def many_rows(
    x_TK: Tensor,
    step_T: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    y_TN: Tensor,
    multiprocessors: int,
    tiles: ManyTiles,
) -> None:
    """Fill `y_TN` with x W^T + bias, best of many rows; see `few_rows`."""
    (rows, inputs), outputs = x_TK.shape, weight_NK.shape[0]
    if not rows:
        return
    x, weight = x_TK, weight_NK
    if tiles.copied:
        x = TensorDescriptor(x_TK, [rows, inputs], [inputs, 1], [tiles.rows, tiles.inputs])
        weight = TensorDescriptor(weight_NK, [outputs, inputs], [inputs, 1], [tiles.outputs, tiles.inputs])
    count = triton.cdiv(rows, tiles.rows) * triton.cdiv(outputs, tiles.outputs)
    programs = min(count, tiles.programs * multiprocessors) if tiles.programs else count
    _many[(programs,)](
        x, step_T, weight, scale_N, bias_N, y_TN, rows, outputs, inputs,
        tiles.rows, tiles.outputs, tiles.inputs, _NEAR, tiles.copied, inputs % tiles.inputs == 0,
        num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip


def few_tiles(rows: int, outputs: int, inputs: int, multiprocessors: int) -> FewTiles:
    """Return how few rows are computed."""
    if rows > 64:
        return FewTiles(128, 64, 128, 4, 4)
    most = _PROGRAMS_PER_SM * multiprocessors // triton.cdiv(outputs, 64)
    parts = max(1, min(_MOST_PARTS, most, triton.cdiv(inputs, 128)))
    return FewTiles(64, 16 if rows <= 16 else 32 if rows <= 32 else 64, 128, 4, 5, parts)


def many_tiles(hopper: bool) -> ManyTiles:
    """Return how many rows are computed; others than a Hopper GPU have too little memory for tiles of copies."""
    return ManyTiles(128, 128, 128, 8, 3, copied=hopper)
