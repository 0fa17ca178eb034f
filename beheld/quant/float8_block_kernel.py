"""Triton kernels of FP8 weights with a scale for each block: activations rounded by row and group, sums in float32.

A group's products are summed by the tensor cores and then added to float32, times both scales. Weights are the first
operand, outputs its rows: tensor cores take at least 64 of these, and as few as 8 of the other's. With few rows there
are too few tiles of outputs to read memory at full speed, so the inputs are split among programs, whose sums another
kernel adds in order.

Slots and tiles of grouped products: see slots.py.

Shapes: T rows, S slots, N outputs, K inputs, G groups of C inputs, R outputs of one scale, P parts of the inputs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from beheld.quant.float8_kernel import float8_scale, in_steps
from beheld.quant.slots import UNSORTED
from beheld.quant.slots_kernel import num_tiles, tile_slots

_PROGRAMS_PER_SM = 4
# With a scale for each output: parts cost more than further programs gain (7B's layers on an H200).
_PROGRAMS_PER_SM_BY_OUTPUT = 2
_MOST_PARTS = 16


@dataclass(frozen=True)
class Tiles:
    """The launch of a product.

    Attributes:
        outputs, rows: of a tile.
        warps, stages: of a program.
        parts: of the inputs.
    """

    outputs: int
    rows: int
    warps: int
    stages: int
    parts: int = 1


@triton.jit
def _rounded_groups(
    x_ptr, out_ptr, scale_ptr, x_stride, num_rows, num_inputs, scale_stride, C: tl.constexpr, G: tl.constexpr
):
    """One program rounds G groups of one row, each of whose maximum becomes 448; rows beyond the end become zeros."""
    row = tl.program_id(0).to(tl.int64)
    g_G = tl.program_id(1) * G + tl.arange(0, G)
    k_GC = g_G[:, None] * C + tl.arange(0, C)[None, :]
    inside_GC = k_GC < num_inputs
    x_GC = tl.load(x_ptr + row * x_stride + k_GC, mask=inside_GC & (row < num_rows), other=0.0).to(tl.float32)
    scale_G = float8_scale(tl.max(tl.abs(x_GC), 1))
    rounded_GC = in_steps(x_GC, scale_G[:, None])
    tl.store(out_ptr + row * num_inputs + k_GC, rounded_GC.to(out_ptr.dtype.element_ty), mask=inside_GC)
    tl.store(scale_ptr + g_G.to(tl.int64) * scale_stride + row, scale_G, mask=g_G * C < num_inputs)


@triton.jit
def _sum(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    row_T,
    line_N,
    block,
    num_inputs,
    num_scale_rows,
    first,
    last,
    N: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
):
    """Return the sum (N, T) of the groups from `first` to `last`.

    Args:
        row_T: rows of x.
        line_N: lines of the weights; `block` is that of the first one's scale.
        num_scale_rows: rows of x that have scales.
    """
    num_groups = num_inputs // C
    c_C = tl.arange(0, C)
    x_TC_ptr = x_ptr + row_T[:, None] * num_inputs + c_C[None, :]
    w_NC_ptr = weight_ptr + line_N[:, None] * num_inputs + c_C[None, :]
    if R % N == 0:  # noqa: SIM108 (one number or N of them)
        w_scale_ptr = scale_ptr + block * num_groups
    else:
        w_scale_ptr = scale_ptr + (line_N // R) * num_groups
    acc_NT = tl.zeros([N, T], tl.float32)
    # Scales are read a group before they are needed.
    next_x_scale_T = tl.load(x_scale_ptr + first * num_scale_rows + row_T)
    next_w_scale = tl.load(w_scale_ptr + first)
    for g in range(first, last):
        x_scale_T, w_scale = next_x_scale_T, next_w_scale
        later = tl.minimum(g + 1, last - 1)
        next_x_scale_T = tl.load(x_scale_ptr + later * num_scale_rows + row_T)
        next_w_scale = tl.load(w_scale_ptr + later)
        part_NT = tl.dot(tl.load(w_NC_ptr + g * C), tl.trans(tl.load(x_TC_ptr + g * C)))
        if R % N == 0:
            acc_NT += part_NT * (x_scale_T * w_scale)[None, :]
        else:
            acc_NT += part_NT * w_scale[:, None] * x_scale_T[None, :]
    return acc_NT


@triton.jit
def _sum_by_output(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    row_T,
    line_N,
    num_inputs,
    first,
    last,
    N: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """As `_sum`, where each output and each row has one scale for all inputs."""
    c_C = tl.arange(0, C)
    x_TC_ptr = x_ptr + row_T[:, None] * num_inputs + c_C[None, :]
    w_NC_ptr = weight_ptr + line_N[:, None] * num_inputs + c_C[None, :]
    acc_NT = tl.zeros([N, T], tl.float32)
    for g in range(first, last):
        # Hopper's FP8 accumulators keep fourteen bits; after each group they are added to a float32 accumulator.
        w_NC, x_CT = tl.load(w_NC_ptr + g * C), tl.trans(tl.load(x_TC_ptr + g * C))
        acc_NT = tl.dot(w_NC, x_CT, acc_NT, max_num_imprecise_acc=C)
    return acc_NT * tl.load(scale_ptr + line_N)[:, None] * tl.load(x_scale_ptr + row_T)[None, :]


@triton.jit
def _product(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    num_scale_rows,
    groups_per_part,
    N: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BIAS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """One program computes N outputs of T rows over one part of the groups, into its part of y (P, T, N).

    R: 0 if each output and each row has one scale for all inputs.
    """
    # Successive programs share weights of few tiles, and rows of NEAR tiles, which then stay in the cache.
    columns, tiles = tl.cdiv(num_outputs, N), tl.cdiv(num_rows, T)
    block = tl.program_id(0) // (NEAR * columns)
    height = tl.minimum(tiles - block * NEAR, NEAR)
    within = tl.program_id(0) % (NEAR * columns)
    t_T = (block * NEAR + within % height) * T + tl.arange(0, T)
    first_n = within // height * N
    n_N = first_n + tl.arange(0, N)
    there_T, inside_N = t_T < num_rows, n_N < num_outputs
    # Rows and outputs beyond the end are read from its start and not written.
    row_T = tl.where(there_T, t_T, 0).to(tl.int64)
    line_N = tl.where(inside_N, n_N, 0).to(tl.int64)
    part = tl.program_id(1)
    first = part * groups_per_part
    last = tl.minimum(first + groups_per_part, num_inputs // C)
    if R == 0:
        acc_NT = _sum_by_output(
            x_ptr, x_scale_ptr, weight_ptr, scale_ptr, row_T, line_N, num_inputs, first, last, N, T, C
        )
    else:
        acc_NT = _sum(
            x_ptr, x_scale_ptr, weight_ptr, scale_ptr, row_T, line_N, first_n // R, num_inputs, num_scale_rows,
            first, last, N, T, C, R,
        )  # fmt: skip
    if BIAS:
        acc_NT += tl.load(bias_ptr + line_N).to(tl.float32)[:, None]
    y_NT_ptr = y_ptr + (part.to(tl.int64) * num_rows + t_T)[None, :] * num_outputs + n_N[:, None]
    tl.store(y_NT_ptr, acc_NT.to(y_ptr.dtype.element_ty), mask=there_T[None, :] & inside_N[:, None])


@triton.jit(do_not_specialize=["share"])
def _grouped_product(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    order_ptr,
    starts_ptr,
    y_ptr,
    share,
    num_slots,
    num_experts,
    num_outputs,
    num_inputs,
    num_scale_rows,
    N: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    SORTED: tl.constexpr,
):
    """One program multiplies one tile: T slots of one expert, N outputs. A row of x serves `share` successive slots."""
    expert, slot_T, count = tile_slots(order_ptr, starts_ptr, num_slots, num_experts, T, E, SORTED)
    if count <= 0:
        return
    first_n = tl.program_id(1) * N
    n_N = first_n + tl.arange(0, N)
    inside_N = n_N < num_outputs
    line_N = expert.to(tl.int64) * num_outputs + tl.where(inside_N, n_N, 0)
    # A scale never serves two experts: R divides the outputs.
    block = (expert.to(tl.int64) * num_outputs + first_n) // R
    acc_NT = _sum(
        x_ptr, x_scale_ptr, weight_ptr, scale_ptr, slot_T // share, line_N, block, num_inputs, num_scale_rows,
        0, num_inputs // C, N, T, C, R,
    )  # fmt: skip
    there_T = tl.arange(0, T) < count
    y_NT_ptr = y_ptr + slot_T[None, :] * num_outputs + n_N[:, None]
    tl.store(y_NT_ptr, acc_NT.to(y_ptr.dtype.element_ty), mask=there_T[None, :] & inside_N[:, None])


@triton.jit
def _added(parts_ptr, bias_ptr, y_ptr, num_numbers, num_outputs, P: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr):
    """One program adds S numbers of all parts."""
    s_S = tl.program_id(0) * S + tl.arange(0, S)
    inside_S = s_S < num_numbers
    sum_S = tl.zeros([S], tl.float32)
    for part in tl.static_range(P):
        sum_S += tl.load(parts_ptr + part * num_numbers + s_S, mask=inside_S, other=0.0)
    if BIAS:
        sum_S += tl.load(bias_ptr + s_S % num_outputs, mask=inside_S, other=0.0).to(tl.float32)
    tl.store(y_ptr + s_S, sum_S.to(y_ptr.dtype.element_ty), mask=inside_S)


def rounded_groups(x_TK: Tensor, out_TK: Tensor, scale_GT: Tensor) -> None:
    """Fill `out_TK` (FP8) and `scale_GT` (float32), whose product is x up to rounding; x may be strided by rows.

    The size of a group follows from the number of scales, and is a power of two. There may be more rows than x has,
    which become zeros.
    """
    (rows, inputs), groups = out_TK.shape, scale_GT.shape[0]
    if rows:
        size = inputs // groups
        block = min(triton.next_power_of_2(groups), max(1, 4096 // size))
        grid = rows, triton.cdiv(groups, block)
        _rounded_groups[grid](
            x_TK,
            out_TK,
            scale_GT,
            x_TK.stride(0),
            x_TK.shape[0],
            inputs,
            scale_GT.stride(0),
            size,
            block,
            num_warps=4,
            enable_fp_fusion=True,
        )


def product(
    x_TK: Tensor,
    x_scale_GT: Tensor,
    weight_NK: Tensor,
    scale_BG: Tensor,
    outputs_per_scale: int,
    bias_N: Tensor | None,
    y_TN: Tensor,
    multiprocessors: int,
    tiles: Tiles | None = None,
) -> None:
    """Fill `y_TN` with x W^T + bias.

    Args:
        x_TK, x_scale_GT: see `rounded_groups`; contiguous.
        scale_BG: of blocks of outputs, and of groups of inputs.
        multiprocessors: of the GPU.
        tiles: None to choose.
    """
    given = x_TK, x_scale_GT, weight_NK, scale_BG, bias_N, y_TN
    programs = _PROGRAMS_PER_SM * multiprocessors
    _launch(given, scale_BG.shape[1], outputs_per_scale, x_scale_GT.stride(0), programs, tiles)


def product_by_output(
    x_TK: Tensor,
    x_scale_T: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    y_TN: Tensor,
    multiprocessors: int,
) -> None:
    """Fill `y_TN` with x W^T + bias, with a scale for each row and each output; inputs are a multiple of 32.

    Args:
        x_TK, x_scale_T: see float8.rounded_rows; contiguous.
        multiprocessors: of the GPU.
    """
    size = next(size for size in (128, 64, 32) if x_TK.shape[1] % size == 0)
    given = x_TK, x_scale_T, weight_NK, scale_N, bias_N, y_TN
    _launch(given, x_TK.shape[1] // size, 0, 0, _PROGRAMS_PER_SM_BY_OUTPUT * multiprocessors, None)


def _launch(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor],
    groups: int,
    outputs_per_scale: int,
    scale_rows: int,
    programs: int,
    tiles: Tiles | None,
) -> None:
    x_TK, x_scale, weight_NK, scale, bias_N, y_TN = given
    (rows, inputs), outputs = x_TK.shape, weight_NK.shape[0]
    if not rows:
        return
    size = inputs // groups
    made = _tiles(rows, outputs, groups, programs) if tiles is None else tiles
    per_part = triton.cdiv(groups, made.parts)
    parts = triton.cdiv(groups, per_part)
    out = y_TN if parts == 1 else y_TN.new_empty((parts, rows, outputs), dtype=scale.dtype)
    _product[(triton.cdiv(outputs, made.outputs) * triton.cdiv(rows, made.rows), parts)](
        x_TK,
        x_scale,
        weight_NK,
        scale,
        bias_N,
        out,
        rows,
        outputs,
        inputs,
        scale_rows,
        per_part,
        made.outputs,
        made.rows,
        size,
        outputs_per_scale,
        bias_N is not None and parts == 1,
        8,
        num_warps=made.warps,
        num_stages=made.stages,
        enable_fp_fusion=True,
    )
    if parts > 1:
        add_parts(out, bias_N, y_TN)


def add_parts(parts_PTN: Tensor, bias_N: Tensor | None, y_TN: Tensor) -> None:
    """Fill `y_TN` with the sum of parts, in order, plus bias."""
    size = 512
    _added[(triton.cdiv(y_TN.numel(), size),)](
        parts_PTN,
        bias_N,
        y_TN,
        y_TN.numel(),
        y_TN.shape[1],
        parts_PTN.shape[0],
        size,
        bias_N is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )


def grouped_product(
    x_TK: Tensor,
    x_scale_GT: Tensor,
    weight_ENK: Tensor,
    scale_BG: Tensor,
    outputs_per_scale: int,
    order_S: Tensor,
    starts_E1: Tensor,
    y_SN: Tensor,
    share: int,
    tiles: Tiles | None = None,
) -> None:
    """Fill `y_SN`: slot s is row s // share of x, times the matrix of its expert.

    `order_S` and `starts_E1`: see slots.divided. Slots after the last expert's are not written.

    Args:
        x_TK, x_scale_GT, outputs_per_scale: as of `product`.
        scale_BG: of blocks of the outputs of all experts; blocks divide the outputs of one.
        tiles: None to choose.
    """
    experts, outputs, inputs = weight_ENK.shape
    slots, groups = y_SN.shape[0], scale_BG.shape[1]
    if not slots:
        return
    made = _grouped_tiles(slots, experts) if tiles is None else tiles
    _grouped_product[(num_tiles(slots, experts, made.rows), triton.cdiv(outputs, made.outputs))](
        x_TK,
        x_scale_GT,
        weight_ENK,
        scale_BG,
        order_S,
        starts_E1,
        y_SN,
        share,
        slots,
        experts,
        outputs,
        inputs,
        x_scale_GT.stride(0),
        made.outputs,
        made.rows,
        inputs // groups,
        outputs_per_scale,
        triton.next_power_of_2(experts),
        slots > UNSORTED,
        num_warps=made.warps,
        num_stages=made.stages,
        enable_fp_fusion=True,
    )


def _tiles(rows: int, outputs: int, groups: int, programs: int) -> Tiles:
    if rows > 64:
        return Tiles(128, 64, 4, 4)
    most = programs // triton.cdiv(outputs, 64)
    parts = max(1, min(_MOST_PARTS, most, groups))
    return Tiles(64, 16 if rows <= 16 else 32 if rows <= 32 else 64, 4, 5, parts)


def _grouped_tiles(slots: int, experts: int) -> Tiles:
    """Choose by the average number of slots per expert."""
    return Tiles(64, 16, 4, 5) if slots <= 16 * experts else Tiles(128, 64, 4, 4)
