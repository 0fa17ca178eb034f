"""A kernel that writes a step's keys and values into the paged cache, both in one launch.

Shapes: T tokens, K key-value heads, C head size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beheld.attention.backend import LayerKV
from beheld.attention.triton_math import stored

# Elements of keys, and as many of values, that one program moves.
_ELEMENTS = 2048


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _store(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    num_tokens,
    k_token,
    k_head,
    v_token,
    v_head,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
):
    """One program moves TOKENS tokens; a token's heads are contiguous in the cache."""
    tokens_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside_T = tokens_T < num_tokens
    slots_T = tl.load(slots_ptr + tokens_T, mask=inside_T, other=0).to(tl.int64)
    # Padding has slots of the null block, which stays unchanged.
    inside_T1 = (inside_T & (slots_T >= BLOCK_SIZE))[:, None]
    tokens_T1 = tokens_T.to(tl.int64)[:, None]
    cells = tl.arange(0, WIDTH)[None, :]
    mask = inside_T1 & (cells < KV_HEADS * SIZE)
    k = tl.load(k_ptr + tokens_T1 * k_token + (cells // SIZE) * k_head + cells % SIZE, mask=mask)
    tl.store(keys_ptr + slots_T[:, None] * (KV_HEADS * SIZE) + cells, stored(k, keys_ptr), mask=mask)
    cells = tl.arange(0, V_WIDTH)[None, :]
    mask = inside_T1 & (cells < KV_HEADS * V_SIZE)
    v = tl.load(v_ptr + tokens_T1 * v_token + (cells // V_SIZE) * v_head + cells % V_SIZE, mask=mask)
    tl.store(values_ptr + slots_T[:, None] * (KV_HEADS * V_SIZE) + cells, stored(v, values_ptr), mask=mask)


def store(k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV, slots_T: Tensor) -> None:
    """Write token t's key and value to slot `slots_T[t]`; tokens with slots of the null block are skipped.

    Keys and values may be strided over tokens and heads; within a head they are contiguous.
    """
    block_size, kv_heads, size = kv.keys.shape[1:]
    v_size = kv.values.shape[3]
    width, v_width = triton.next_power_of_2(kv_heads * size), triton.next_power_of_2(kv_heads * v_size)
    tokens = max(1, _ELEMENTS // max(width, v_width))
    num_tokens = k_TKC.shape[0]
    _store[(triton.cdiv(num_tokens, tokens),)](
        k_TKC,
        v_TKC,
        kv.keys,
        kv.values,
        slots_T,
        num_tokens,
        k_TKC.stride(0),
        k_TKC.stride(1),
        v_TKC.stride(0),
        v_TKC.stride(1),
        kv_heads,
        size,
        v_size,
        block_size,
        tokens,
        width,
        v_width,
        num_warps=4,
        enable_fp_fusion=True,
    )
