"""Attention of vision towers on packed windows in one Triton kernel, without reading lengths back to the host.

Shapes: T tokens of all windows, W windows, H heads, C head size, R rows (queries) of a tile, N keys of a tile, D
elements of a head beyond the largest power of two.

Tiles of queries ignore window boundaries; a tile visits the keys from its first window's start to its last window's
end, and each row sees only its window:

    windows   |---- 0 ----|-- 1 --|--------- 2 ---------|
    tiles     |=======|=======|=======|=======|=======|=|       tile 1: keys of windows 0 and 1
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from beheld.attention.triton_math import add_values, products, unit, weigh

# The largest number of 16-bit elements that one load takes.
_UNIT = 8
# Longer windows on average use tiles with more rows.
_LONG_WINDOW = 256


@triton.jit(do_not_specialize=["num_tokens", "num_windows", "num_halvings"])
def _tower(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    bounds_ptr,
    num_tokens,
    num_windows,
    num_halvings,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One program computes one tile of queries and one head.

    A head of 80 elements is computed as 64 and 16: as 128 it would take much longer.

    UNIT: strides are multiples of this many elements, so that the compiler knows how much one load can take.
    """
    head = tl.program_id(1)
    q_ptr += head * (q_head * UNIT)
    k_ptr += head * (k_head * UNIT)
    v_ptr += head * (v_head * UNIT)
    token_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_R = token_R < num_tokens
    # Binary search for each query's window: bounds[low] <= token < bounds[high] throughout.
    low_R = tl.zeros([ROWS], tl.int32)
    high_R = low_R + num_windows
    for _ in range(num_halvings):
        middle_R = (low_R + high_R) // 2
        behind_R = tl.load(bounds_ptr + middle_R) <= token_R
        low_R = tl.where(behind_R, middle_R, low_R)
        high_R = tl.where(behind_R, high_R, middle_R)
    start_R = tl.where(there_R, tl.load(bounds_ptr + low_R).to(tl.int32), num_tokens)
    stop_R = tl.where(there_R, tl.load(bounds_ptr + low_R + 1).to(tl.int32), 0)
    c_C = tl.arange(0, WIDTH)
    d_D = WIDTH + tl.arange(0, REST if REST else 16)
    inside_C = c_C < SIZE
    inside_D = d_D < SIZE
    q_R1 = q_ptr + (token_R.to(tl.int64) * (q_token * UNIT))[:, None]
    q_RC = tl.load(q_R1 + c_C[None, :], mask=there_R[:, None] & inside_C[None, :], other=0.0)
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([ROWS], tl.float32)
    acc_RC = tl.zeros([ROWS, WIDTH], tl.float32)
    if REST:
        q_RD = tl.load(q_R1 + d_D[None, :], mask=there_R[:, None] & inside_D[None, :], other=0.0)
        acc_RD = tl.zeros([ROWS, REST], tl.float32)
    factor = unit(scale, False)
    end = tl.max(stop_R, 0)
    for key in range(tl.min(start_R, 0), end, TILE):
        key_N = key + tl.arange(0, TILE)
        live_N1 = (key_N < end)[:, None]
        k_N1 = k_ptr + (key_N.to(tl.int64) * (k_token * UNIT))[:, None]
        v_N1 = v_ptr + (key_N.to(tl.int64) * (v_token * UNIT))[:, None]
        s_RN = products(q_RC, tl.load(k_N1 + c_C[None, :], mask=live_N1 & inside_C[None, :], other=0.0))
        if REST:
            s_RN += products(q_RD, tl.load(k_N1 + d_D[None, :], mask=live_N1 & inside_D[None, :], other=0.0))
        seen_RN = (key_N[None, :] >= start_R[:, None]) & (key_N[None, :] < stop_R[:, None])
        s_RN = tl.where(seen_RN, s_RN, float("-inf"))
        m_R, l_R, shrink_R, p_RN = weigh(s_RN, m_R, l_R, factor, True)
        v_NC = tl.load(v_N1 + c_C[None, :], mask=live_N1 & inside_C[None, :], other=0.0)
        acc_RC = add_values(acc_RC, shrink_R, p_RN, v_NC)
        if REST:
            v_ND = tl.load(v_N1 + d_D[None, :], mask=live_N1 & inside_D[None, :], other=0.0)
            acc_RD = add_values(acc_RD, shrink_R, p_RN, v_ND)
    l_R1 = tl.where(there_R, l_R, 1.0)[:, None]
    out_R1 = out_ptr + ((token_R.to(tl.int64) * HEADS + head) * SIZE)[:, None]
    tl.store(out_R1 + c_C[None, :], acc_RC / l_R1, mask=there_R[:, None] & inside_C[None, :])
    if REST:
        tl.store(out_R1 + d_D[None, :], acc_RD / l_R1, mask=there_R[:, None] & inside_D[None, :])


def attend_windows(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, bounds_W1: Tensor, scale: float) -> Tensor:
    """Attend within each window, both ways; returns (T, H, C), contiguous.

    q, k, v may be strided over tokens and heads; within a head they are contiguous.

    Args:
        bounds_W1: integers, where each window starts, and T at the end; non-decreasing.
    """
    num_tokens, heads, size = q_THC.shape
    num_windows = bounds_W1.shape[0] - 1
    out_THC = q_THC.new_empty((num_tokens, heads, size))
    rows, tile, warps = shape_of(num_tokens // max(1, num_windows), q_THC.element_size())
    width, rest = _split(size)
    strides = [x.stride(axis) for x in (q_THC, k_THC, v_THC) for axis in (0, 1)]
    unit = math.gcd(*strides, _UNIT)
    _tower[(triton.cdiv(num_tokens, rows), heads)](
        q_THC,
        k_THC,
        v_THC,
        out_THC,
        bounds_W1,
        num_tokens,
        num_windows,
        num_windows.bit_length(),
        scale,
        *(stride // unit for stride in strides),
        heads,
        size,
        rows,
        tile,
        width,
        rest,
        unit,
        num_warps=warps,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return out_THC


def _split(size: int) -> tuple[int, int]:
    """Return a head's size as two powers of two, the second 0 if one is enough; their sum may exceed the size."""
    whole = max(16, triton.next_power_of_2(size))
    rest = max(16, triton.next_power_of_2(size - whole // 2))
    return (whole // 2, rest) if whole > 16 and whole // 2 + rest < whole else (whole, 0)


def shape_of(window: int, element_bytes: int) -> tuple[int, int, int]:
    """Return rows and keys per tile, and warps, for windows of `window` tokens on average."""
    if element_bytes == 4:
        return 32, 32, 4
    return (128, 64, 8) if window > _LONG_WINDOW else (64, 64, 4)
