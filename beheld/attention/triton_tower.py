"""Attention of vision towers on packed windows in one Triton kernel: nothing is read back, whatever the lengths.

Shapes: T tokens of all windows, W windows, H heads, C head size, R rows (queries) of a tile, N keys of a tile.

Queries are cut into tiles without regard to windows; a tile visits the keys from its first window's start to its last
window's end, and each row sees its own window's:

    windows   |---- 0 ----|-- 1 --|--------- 2 ---------|
    tiles     |=======|=======|=======|=======|=======|=|       tile 1: keys of windows 0 and 1
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beheld.attention.triton_math import accumulate, products, unit

# Windows longer than this on average are worth tiles of more rows.
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
):
    """One program: one tile of queries, one head."""
    head = tl.program_id(1)
    token_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there_R = token_R < num_tokens
    # Each query's window, by halving: bounds[low] <= token < bounds[high] all the way.
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
    inside_C = c_C < SIZE
    inside_RC = there_R[:, None] & inside_C[None, :]
    q_RC = tl.load(
        q_ptr + token_R.to(tl.int64)[:, None] * q_token + head * q_head + c_C[None, :], mask=inside_RC, other=0.0
    )
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([ROWS], tl.float32)
    acc_RC = tl.zeros([ROWS, WIDTH], tl.float32)
    factor = unit(scale, False)
    end = tl.max(stop_R, 0)
    for key in range(tl.min(start_R, 0), end, TILE):
        key_N = key + tl.arange(0, TILE)
        inside_NC = (key_N < end)[:, None] & inside_C[None, :]
        key_N64 = key_N.to(tl.int64)
        k_NC = tl.load(k_ptr + key_N64[:, None] * k_token + head * k_head + c_C[None, :], mask=inside_NC, other=0.0)
        seen_RN = (key_N[None, :] >= start_R[:, None]) & (key_N[None, :] < stop_R[:, None])
        s_RN = tl.where(seen_RN, products(q_RC, k_NC), float("-inf"))
        v_NC = tl.load(v_ptr + key_N64[:, None] * v_token + head * v_head + c_C[None, :], mask=inside_NC, other=0.0)
        m_R, l_R, acc_RC = accumulate(s_RN, v_NC, m_R, l_R, acc_RC, factor, True)
    tl.store(
        out_ptr + (token_R.to(tl.int64)[:, None] * HEADS + head) * SIZE + c_C[None, :],
        acc_RC / tl.where(there_R, l_R, 1.0)[:, None],
        mask=inside_RC,
    )


def attend_windows(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, bounds_W1: Tensor, scale: float) -> Tensor:
    """Attention within each window, both ways; (T, H, C), contiguous.

    q, k, v may be strided over tokens and heads; within a head they are contiguous.

    Args:
        bounds_W1: integers, where each window starts, and T at the end; not decreasing.
    """
    num_tokens, heads, size = q_THC.shape
    num_windows = bounds_W1.shape[0] - 1
    out_THC = q_THC.new_empty((num_tokens, heads, size))
    rows, tile, warps = shape_of(num_tokens // max(1, num_windows), q_THC.element_size())
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
        q_THC.stride(0),
        q_THC.stride(1),
        k_THC.stride(0),
        k_THC.stride(1),
        v_THC.stride(0),
        v_THC.stride(1),
        heads,
        size,
        rows,
        tile,
        max(16, triton.next_power_of_2(size)),
        num_warps=warps,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return out_THC


def shape_of(window: int, element_bytes: int) -> tuple[int, int, int]:
    """Rows and keys of a tile, and warps, for windows of `window` tokens on average."""
    if element_bytes == 4:
        return 32, 32, 4
    return (128, 64, 8) if window > _LONG_WINDOW else (64, 64, 4)
