"""Triton kernels of FP8 layers: activations rounded with one scale per row, and grouped products.

Shapes: T given rows, S slots (each a row that is multiplied with one group's matrix), G groups, N outputs, K inputs.

Slots are processed in group order, tile by tile. A tile never holds slots of two groups, so a group's last tile is
partly empty. Only the device knows the number of tiles, so the grid has as many programs as could be needed, and
programs beyond the last tile return at once: one CUDA graph serves any division into groups.

    order     4 0 7 | 1 | 2 3 5 6 9 |         slots by group; starts 0 3 4 9
    tiles     |===|=| |=| |===|===|=|         of two slots
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait

# The largest finite number of FP8 (float8_e4m3fn).
MOST: tl.constexpr = tl.constexpr(448.0)


# The smallest scale, whose reciprocal is finite.
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)
# Rows of more inputs are read twice: once held, they would leave room for one program on a multiprocessor.
_HELD = 8192
_AT_A_TIME = 4096


@triton.jit
def float8_scale(largest):
    """Return the scales of rows or groups whose largest numbers become 448; zeros stay zero. See float8.scale_of."""
    return tl.where(largest > 0, tl.maximum(tl.math.div_rn(largest, MOST), _LEAST), 1.0)


@triton.jit
def in_steps(x, scale):
    """Return x in units of its scales, within what FP8 holds; not yet rounded.

    Args:
        scale: of a shape that broadcasts to that of x. Its reciprocal is multiplied: a division of each number takes
            several times as long.
    """
    steps = x * tl.math.div_rn(1.0, scale)
    # Both operations round, and a number beyond the maximum would become NaN.
    return tl.where(steps > MOST, MOST, tl.where(steps < -MOST, -MOST, steps))


@triton.jit
def _rounded_rows(x_ptr, out_ptr, scale_ptr, x_stride, num_inputs, K: tl.constexpr, EARLY: tl.constexpr):
    """One program rounds one row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, K)
    inside_K = k_K < num_inputs
    x_K = tl.load(x_ptr + row * x_stride + k_K, mask=inside_K, other=0.0).to(tl.float32)
    scale = float8_scale(tl.max(tl.abs(x_K), 0))
    tl.store(out_ptr + row * num_inputs + k_K, in_steps(x_K, scale).to(out_ptr.dtype.element_ty), mask=inside_K)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _rounded_long_rows(x_ptr, out_ptr, scale_ptr, x_stride, num_inputs, K: tl.constexpr):
    """One program rounds one row, K numbers at a time."""
    row = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, K)
    x_K_ptr = x_ptr + row * x_stride + k_K
    largest_K = tl.zeros([K], tl.float32)
    for at in range(0, num_inputs, K):
        x_K = tl.load(x_K_ptr + at, mask=at + k_K < num_inputs, other=0.0).to(tl.float32)
        largest_K = tl.maximum(largest_K, tl.abs(x_K))
    scale = float8_scale(tl.max(largest_K, 0))
    for at in range(0, num_inputs, K):
        inside_K = at + k_K < num_inputs
        x_K = tl.load(x_K_ptr + at, mask=inside_K, other=0.0).to(tl.float32)
        tl.store(
            out_ptr + row * num_inputs + at + k_K, in_steps(x_K, scale).to(out_ptr.dtype.element_ty), mask=inside_K
        )
    tl.store(scale_ptr + row, scale)


def rounded_rows(x_TK: Tensor, out_TK: Tensor, scale_T: Tensor, *, early: bool = False) -> None:
    """Fill `out_TK` (FP8) and `scale_T` (float32), whose product is x up to rounding; x may be strided by rows.

    Args:
        early: start before the previous kernel ends; only if the hardware can, and for a single row.
    """
    round_by_row(_rounded_rows, _rounded_long_rows, x_TK, out_TK, scale_T, early=early, fused=True)


def round_by_row(
    held: Any, long: Any, x_TK: Tensor, out_TK: Tensor, step_T: Tensor, *, early: bool, fused: bool
) -> None:
    """Launch one of two kernels that round rows: the first holds a row, the second reads it twice, part by part.

    Args:
        early: see rounded_rows.
        fused: whether multiplications and additions may be fused.
    """
    rows, inputs = x_TK.shape
    given = x_TK, out_TK, step_T, x_TK.stride(0), inputs
    if rows == 1 or (rows and inputs <= _HELD):
        block = triton.next_power_of_2(inputs)
        # A single row's program is waited for.
        warps = min(32 if rows == 1 else 16, max(1, block // 512))
        held[(rows,)](
            *given, block, early, num_warps=warps, enable_fp_fusion=fused, **({"launch_pdl": True} if early else {})
        )
    elif rows:
        long[(rows,)](*given, _AT_A_TIME, num_warps=8, enable_fp_fusion=fused)


@triton.jit(do_not_specialize=["share"])
def _grouped_product(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    order_ptr,
    starts_ptr,
    y_ptr,
    share,
    num_groups,
    num_outputs,
    num_inputs,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
):
    """One program multiplies one tile: M slots of one group, N outputs. A row of x serves `share` successive slots."""
    tile = tl.program_id(0)
    g_G = tl.arange(0, G)
    starts_G = tl.load(starts_ptr + g_G, mask=g_G < num_groups, other=0).to(tl.int32)
    stops_G = tl.load(starts_ptr + g_G + 1, mask=g_G < num_groups, other=0).to(tl.int32)
    last_tiles_G = tl.cumsum((stops_G - starts_G + M - 1) // M, 0)
    group = tl.sum((last_tiles_G <= tile).to(tl.int32), 0)
    if group >= num_groups:
        return
    before = tl.max(tl.where(g_G < group, last_tiles_G, 0), 0)
    start = tl.load(starts_ptr + group).to(tl.int32) + (tile - before) * M
    stop = tl.load(starts_ptr + group + 1).to(tl.int32)
    place_M = start + tl.arange(0, M)
    there_M = place_M < stop
    slot_M = tl.load(order_ptr + place_M, mask=there_M, other=0).to(tl.int64)
    row_M = slot_M // share
    n_N = tl.program_id(1) * N + tl.arange(0, N)
    inside_N = n_N < num_outputs
    line_N = group.to(tl.int64) * num_outputs + n_N
    k_K = tl.arange(0, K)
    x_MK_ptr = x_ptr + row_M[:, None] * num_inputs + k_K[None, :]
    w_NK_ptr = weight_ptr + line_N[:, None] * num_inputs + k_K[None, :]
    acc_MN = tl.zeros([M, N], tl.float32)
    for first in range(0, num_inputs, K):
        left_K = first + k_K < num_inputs
        x_MK = tl.load(x_MK_ptr + first, mask=there_M[:, None] & left_K[None, :], other=0.0)
        w_NK = tl.load(w_NK_ptr + first, mask=inside_N[:, None] & left_K[None, :], other=0.0)
        # Hopper's FP8 accumulators keep fourteen bits; after K products they are added to a float32 accumulator.
        acc_MN = tl.dot(x_MK, tl.trans(w_NK), acc_MN, max_num_imprecise_acc=K)
    x_scale_M = tl.load(x_scale_ptr + row_M, mask=there_M, other=0.0)
    w_scale_N = tl.load(weight_scale_ptr + line_N, mask=inside_N, other=0.0)
    y_MN = acc_MN * x_scale_M[:, None] * w_scale_N[None, :]
    y_MN_ptr = y_ptr + slot_M[:, None] * num_outputs + n_N[None, :]
    tl.store(y_MN_ptr, y_MN.to(y_ptr.dtype.element_ty), mask=there_M[:, None] & inside_N[None, :])


def grouped_product(
    x_TK: Tensor,
    x_scale_T: Tensor,
    weight_GNK: Tensor,
    weight_scale_GN: Tensor,
    order_S: Tensor,
    starts_G1: Tensor,
    y_SN: Tensor,
    share: int,
) -> None:
    """Fill `y_SN`: slot s is row s // share of x, times the matrix of its group.

    `order_S` and `starts_G1` as in the figure above. Slots after the last group's are not written.
    """
    groups, outputs, inputs = weight_GNK.shape
    slots = y_SN.shape[0]
    if not slots:
        return
    rows, columns, depth, warps, stages = _tiles(slots, groups)
    # Each group with slots fills at most one tile in part.
    tiles = min(slots, triton.cdiv(slots, rows) + groups)
    _grouped_product[(tiles, triton.cdiv(outputs, columns))](
        x_TK,
        x_scale_T,
        weight_GNK,
        weight_scale_GN,
        order_S,
        starts_G1,
        y_SN,
        share,
        groups,
        outputs,
        inputs,
        rows,
        columns,
        depth,
        triton.next_power_of_2(groups),
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=True,
    )


def _tiles(slots: int, groups: int) -> tuple[int, int, int, int, int]:
    """Return a tile's slots, outputs and inputs, warps and stages, by the average number of slots per group.

    With few slots, reading weights takes all the time, so as many reads as possible are in flight at once.
    """
    if slots <= 16 * groups:
        return 16, 64, 256, 4, 4
    return (64, 128, 128, 4, 3) if slots <= 64 * groups else (128, 128, 128, 8, 3)
