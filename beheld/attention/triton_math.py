"""Mathematics that the attention kernels share: scores, and a softmax computed tile by tile.

Shapes: R rows (query heads of one key-value head, times queries), N keys of a tile, C head size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Return products of queries and keys as `accumulate` takes them, with the soft cap if there is one.

    tanh(x) = 1 - 2 / (e^2x + 1), correct at both ends even where the exponential overflows.
    """
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2 * _LOG2_E * scale / softcap)) + 1.0))
    return s


@triton.jit
def unit(scale, SOFTCAP: tl.constexpr):
    """Return the factor that turns `capped` into exponents of two, which is what the hardware computes."""
    return _LOG2_E if SOFTCAP else scale * _LOG2_E


@triton.jit
def stored(x, cache_ptr):
    """Return numbers in a cache's type; in FP8 as float8_kv.rounded, so that the conversion itself is exact."""
    if cache_ptr.dtype.element_ty.is_fp8():
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        # Three bits stay after the leading one. A sum rounds to the units of its larger part: 2^-9 below 2^-6.
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFFF + ((bits >> 20) & 1)
        large = (bits & -0x100000).to(tl.float32, bitcast=True)
        small = (x + 24576.0) - 24576.0
        x = tl.where(tl.abs(x) < 0.015625, small, tl.where(x == x, large, x))
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def widened(x, q_ptr):
    """Return what was read from a cache: numbers in FP8 in the queries' type, all others as they are."""
    if x.dtype.is_fp8():
        x = x.to(q_ptr.dtype.element_ty)
    return x


@triton.jit
def asked(q, cache_ptr):
    """Return queries in the type in which they meet the keys of a cache, which `widened` returns."""
    if not cache_ptr.dtype.element_ty.is_fp8():
        q = q.to(cache_ptr.dtype.element_ty)
    return q


@triton.jit
def sunk(sinks_ptr, head_R, there_R, factor):
    """Return the heads' sinks, (R), as scores that `factor` turns into exponents of two."""
    return tl.load(sinks_ptr + head_R, mask=there_R, other=0.0).to(tl.float32) * (_LOG2_E / factor)


@triton.jit
def weigh(s_RN, m_R, l_R, factor, GUARD: tl.constexpr, LATE: tl.constexpr = False):
    """Add a tile's scores to the running maximum and sum.

    Returns both, the factor (R) that rescales earlier weighted values, and the weights of this tile's values (R, N).

    factor: see `unit`; it is applied here, and positive, so that scaling and subtracting the maximum are one operation.
    LATE: `l_R` is kept as (R, N), one sum per position in a tile; the caller adds them up at the end. GUARD: a row may
    not have seen a key yet; its maximum is minus infinity, and inf - inf must not become NaN.
    """
    new_R = tl.maximum(m_R, tl.max(s_RN, 1))
    base_R = tl.where(new_R == float("-inf"), 0.0, new_R) if GUARD else new_R
    p_RN = tl.exp2(s_RN * factor - (base_R * factor)[:, None])
    shrink_R = tl.exp2((m_R - base_R) * factor)
    l_R = l_R * shrink_R[:, None] + p_RN if LATE else l_R * shrink_R + tl.sum(p_RN, 1)
    return new_R, l_R, shrink_R, p_RN


@triton.jit
def add_values(acc_RC, shrink_R, p_RN, v_NC):
    """Add a tile's weighted values."""
    return tl.dot(p_RN.to(v_NC.dtype), v_NC, acc_RC * shrink_R[:, None], input_precision="ieee")


@triton.jit
def accumulate(s_RN, v_NC, m_R, l_R, acc_RC, factor, GUARD: tl.constexpr, LATE: tl.constexpr = False):
    """Add a tile to the running maximum, sum and weighted values, and return these; see `weigh`."""
    m_R, l_R, shrink_R, p_RN = weigh(s_RN, m_R, l_R, factor, GUARD, LATE)
    return m_R, l_R, add_values(acc_RC, shrink_R, p_RN, v_NC)


@triton.jit
def blocks_of(table_ptr, position, stop, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return the blocks (N) of positions from `position` to `stop` in a row's block table, the null block after it.

    Loops load them a tile ahead: loads through numbers of the same tile would wait for these, and Triton would then
    hold one tile of keys whatever the number of stages.
    """
    position_N = position + tl.arange(0, TILE)
    return tl.load(table_ptr + position_N // BLOCK_SIZE, mask=position_N < stop, other=0).to(tl.int64)


@triton.jit
def products(q_RC, k_NC):
    """Return queries times keys, (R, N) in float32; products are exact for float32 inputs."""
    return tl.dot(q_RC, tl.trans(k_NC), input_precision="ieee")


@triton.jit
def join(
    acc_ptr,
    sums_ptr,
    first_line,
    stride,
    parts,
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join the sums of `parts` lines, every `stride`-th from `first_line` on; return maxima, sums and weighted values.

    Maxima come first, so that the loads of the long loop wait for nothing.
    """
    heads_R = tl.arange(0, ROWS)
    d_C = tl.arange(0, V_WIDTH)
    inside_RD = (heads_R < GROUP)[:, None] & (d_C < V_SIZE)[None, :]
    few_P = tl.arange(0, 16)
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(0, parts, 16):
        line_PR = ((first_line + (part + few_P) * stride)[:, None] * KV_HEADS + head) * GROUP + heads_R[None, :]
        there_PR = (part + few_P < parts)[:, None] & (heads_R < GROUP)[None, :]
        m_PR = tl.load(sums_ptr + line_PR * 2, mask=there_PR, other=float("-inf"), cache_modifier=".cg")
        m_R = tl.maximum(m_R, tl.max(m_PR, 0))
    # Rows that pad the group have no sums; dividing by 1 keeps them finite.
    m_R = tl.where(heads_R < GROUP, m_R, 0.0)
    l_R = tl.where(heads_R < GROUP, 0.0, 1.0)
    acc_RC = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for part in range(0, parts, PARTS):
        for step in tl.static_range(PARTS):
            there_R = heads_R < tl.where(part + step < parts, GROUP, 0)
            line_R = ((first_line + (part + step) * stride) * KV_HEADS + head) * GROUP + heads_R
            m_part_R = tl.load(sums_ptr + line_R * 2, mask=there_R, other=float("-inf"), cache_modifier=".cg")
            l_part_R = tl.load(sums_ptr + line_R * 2 + 1, mask=there_R, other=0.0, cache_modifier=".cg")
            acc_part_RC = tl.load(
                acc_ptr + line_R[:, None] * V_SIZE + d_C[None, :],
                mask=inside_RD & there_R[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            weight_R = tl.exp2(m_part_R - m_R)
            l_R += l_part_R * weight_R
            acc_RC += acc_part_RC * weight_R[:, None]
    return m_R, l_R, acc_RC
