"""The piece of mathematics that the attention kernels share: scores, and a softmax that goes tile by tile.

Shapes: R rows (query heads of one key-value head, times queries), N keys of a tile, C head size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scores(q_RC, k_NC, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores (R, N) in float32, times log2(e): exponentials are then powers of two, which the hardware computes."""
    s_RN = tl.dot(q_RC, tl.trans(k_NC), input_precision="ieee") * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends also where the exponential overflows.
        s_RN = softcap * (1.0 - 2.0 / (tl.exp2(s_RN * (2 * 1.4426950408889634 / softcap)) + 1.0))
    return s_RN * 1.4426950408889634


@triton.jit
def accumulate(s_RN, v_NC, m_R, l_R, acc_RC, GUARD: tl.constexpr):
    """Take a tile into the running maximum, sum and weighted values; returns the three.

    GUARD: a row may have seen no key yet; its maximum is minus infinity, and inf - inf must not become NaN.
    """
    new_R = tl.maximum(m_R, tl.max(s_RN, 1))
    base_R = tl.where(new_R == float("-inf"), 0.0, new_R) if GUARD else new_R
    p_RN = tl.exp2(s_RN - base_R[:, None])
    shrink_R = tl.exp2(m_R - base_R)
    l_R = l_R * shrink_R + tl.sum(p_RN, 1)
    acc_RC = acc_RC * shrink_R[:, None]
    acc_RC = tl.dot(p_RN.to(v_NC.dtype), v_NC, acc_RC, input_precision="ieee")
    return new_R, l_R, acc_RC
