"""Prefill on the paged cache: many queries per sequence, causal, over a cached prefix and the step's tokens.

Shapes: T tokens, K key-value heads, H query heads, G = H / K of them in a group, C head size, N keys of a tile,
R rows of a tile, L tiles.

The queries of one sequence and the heads of one group form one list of rows, query by query, cut into tiles:

    row        0    1    2    3    4    5    6    7        row r: query r // G, head r % G of the group
    query      0    0    0    1    1    1    2    2 ..     (here G = 3)
    tile      |---------- 0 ---------|------- 1 ----

No row of a tile is idle whatever G is, a key is read once for all heads of its group, and a tile spans few queries, so
little beyond the edge of the causal triangle is computed. Keys and values of the step's tokens are read from the
model's output; only the prefix is read through the block table.

There are two kernels. In the general one, threads load everything. Where no sequence has a prefix or a window, a GPU
with a copy engine (Hopper and later) loads whole tiles, which leaves registers for two concurrent programs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from beheld.attention.backend import AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.triton_math import accumulate, asked, capped, products, sunk, unit, widened


@dataclass(frozen=True)
class TileShape:
    """Rows and keys per tile, warps per program, pipeline stages, and what loads tiles of keys and values.

    Attributes:
        fetch: "threads", or "engine" for the copy engine of Hopper and later.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    fetch: str = "threads"


@dataclass(frozen=True)
class PrefillPlan:
    """What all layers of a group share in one step.

    Attributes:
        tiles_L8: see `make_tiles`.
        ranges_2T: per token of the step, which of its sequence's tokens in this step it sees, int32: the first that
            no window hides, and the one after the last. None if every token sees up to itself.
    """

    tiles_L8: Tensor
    shape: TileShape
    ranges_2T: Tensor | None


@triton.jit(do_not_specialize=["table_row", "num_tokens"], do_not_specialize_on_alignment=["tables_ptr"])
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    tiles_ptr,
    tables_ptr,
    k_tiles,
    v_tiles,
    ranges_ptr,
    num_tokens,
    sinks_ptr,
    scale,
    softcap,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PREFIX: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
):
    """One program computes one tile of rows and one key-value head.

    WINDOW and CHUNK are 0 if absent; with CHUNK, both are set.
    """
    tile = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles_ptr + tile * 8 + 0)
    first_row = tl.load(tiles_ptr + tile * 8 + 1)
    token = tl.load(tiles_ptr + tile * 8 + 2)
    count = tl.load(tiles_ptr + tile * 8 + 3)
    start = tl.load(tiles_ptr + tile * 8 + 4)
    row_R = first_row + tl.arange(0, ROWS)
    query_R = row_R // GROUP
    head_R = head * GROUP + row_R % GROUP
    tile_N = tl.arange(0, TILE)
    c_C = tl.arange(0, WIDTH)
    d_C = tl.arange(0, V_WIDTH)
    inside_C = c_C < SIZE
    inside_D = d_C < V_SIZE
    there_R = query_R < count
    token_R = (token + query_R).to(tl.int64)
    q_RC = tl.load(
        q_ptr + token_R[:, None] * q_token + head_R[:, None] * q_head + c_C[None, :],
        mask=there_R[:, None] & inside_C[None, :],
        other=0.0,
    )
    factor = unit(scale, SOFTCAP)
    if sinks_ptr is None:
        m_R = tl.full([ROWS], float("-inf"), tl.float32)
        l_R = tl.zeros([ROWS], tl.float32)
    else:
        m_R = sunk(sinks_ptr, head_R, there_R, factor)
        l_R = tl.full([ROWS], 1.0, tl.float32)
    acc_RC = tl.zeros([ROWS, V_WIDTH], tl.float32)
    low = first_row // GROUP
    # Of the step's tokens, a query sees those before `sees_R`: up to itself, or to the end of its image. A window does
    # not hide those from `from_R` on.
    if ranges_ptr is None:
        sees_R = query_R + 1
        high = tl.minimum((first_row + ROWS - 1) // GROUP + 1, count)
    else:
        from_R = tl.load(ranges_ptr + token_R, mask=there_R, other=count)
        sees_R = tl.load(ranges_ptr + num_tokens + token_R, mask=there_R, other=0)
        high = tl.max(sees_R, 0)

    # The prefix, through the block table; all of it precedes every query.
    if PREFIX:
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(start + low - WINDOW + 1, 0)
        q_cache_RC = asked(q_RC, keys_ptr)
        table_ptr = tables_ptr + sequence.to(tl.int64) * table_row
        block_N = tl.load(table_ptr + (begin + tile_N) // BLOCK_SIZE, mask=begin + tile_N < start, other=0)
        for position in range(begin, start, TILE):
            position_N = position + tile_N
            live_N = position_N < start
            line_N = (block_N.to(tl.int64) * BLOCK_SIZE + position_N % BLOCK_SIZE) * KV_HEADS + head
            # A tile's blocks are looked up one tile ahead, so that loading keys does not wait for the table.
            next_N = position_N + TILE
            block_N = tl.load(table_ptr + next_N // BLOCK_SIZE, mask=next_N < start, other=0)
            k_NC = tl.load(
                keys_ptr + line_N[:, None] * SIZE + c_C[None, :], mask=live_N[:, None] & inside_C[None, :], other=0.0
            )
            seen_RN = live_N[None, :]
            if WINDOW > 0:
                seen_RN = seen_RN & (position_N[None, :] > start + query_R[:, None] - WINDOW)
            if CHUNK > 0:
                seen_RN = seen_RN & (position_N[None, :] >= (start + query_R[:, None]) // CHUNK * CHUNK)
            k_NC = widened(k_NC, q_ptr)
            s_RN = tl.where(seen_RN, capped(products(q_cache_RC, k_NC), scale, softcap, SOFTCAP), float("-inf"))
            v_NC = tl.load(
                values_ptr + line_N[:, None] * V_SIZE + d_C[None, :],
                mask=live_N[:, None] & inside_D[None, :],
                other=0.0,
            )
            v_NC = widened(v_NC, q_ptr)
            m_R, l_R, acc_RC = accumulate(s_RN, v_NC, m_R, l_R, acc_RC, factor, WINDOW > 0)

    # The step's tokens: first those that every row of the tile sees, then the edge of the triangle.
    k_base = k_ptr + token.to(tl.int64) * k_token + head * k_head
    v_base = v_ptr + token.to(tl.int64) * v_token + head * v_head
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(low - WINDOW + 1, 0)
        if ranges_ptr is not None:
            begin = tl.minimum(begin, tl.min(from_R, 0))
    else:
        whole = (low + 1) // TILE * TILE
        for own in range(0, whole, TILE):
            k_NC = _own(k_base, k_tiles, k_token, token, own, count, head, SIZE, TILE, WIDTH)
            s_RN = capped(products(q_RC, k_NC), scale, softcap, SOFTCAP)
            v_NC = _own(v_base, v_tiles, v_token, token, own, count, head, V_SIZE, TILE, V_WIDTH)
            m_R, l_R, acc_RC = accumulate(s_RN, v_NC, m_R, l_R, acc_RC, factor, False)
        begin = whole
    for own in range(begin, high, TILE):
        own_N = own + tile_N
        k_NC = _own(k_base, k_tiles, k_token, token, own, count, head, SIZE, TILE, WIDTH)
        seen_RN = own_N[None, :] < sees_R[:, None]
        if WINDOW > 0:
            near_RN = own_N[None, :] > query_R[:, None] - WINDOW
            if ranges_ptr is not None:
                near_RN = near_RN | (own_N[None, :] >= from_R[:, None])
            seen_RN = seen_RN & near_RN
        if CHUNK > 0:
            seen_RN = seen_RN & (start + own_N[None, :] >= (start + query_R[:, None]) // CHUNK * CHUNK)
        s_RN = tl.where(seen_RN, capped(products(q_RC, k_NC), scale, softcap, SOFTCAP), float("-inf"))
        v_NC = _own(v_base, v_tiles, v_token, token, own, count, head, V_SIZE, TILE, V_WIDTH)
        # A whole tile may extend into the next sequence: a NaN of another request times a weight of zero is still NaN.
        if v_tiles is not None:
            v_NC = tl.where((own_N < count)[:, None], v_NC, 0.0)
        GUARD: tl.constexpr = WINDOW > 0 or ranges_ptr is not None
        m_R, l_R, acc_RC = accumulate(s_RN, v_NC, m_R, l_R, acc_RC, factor, GUARD)

    tl.store(
        out_ptr + (token_R[:, None] * (KV_HEADS * GROUP) + head_R[:, None]) * V_SIZE + d_C[None, :],
        acc_RC / tl.where(there_R, l_R, 1.0)[:, None],
        mask=there_R[:, None] & inside_D[None, :],
    )


@triton.jit
def _own(base, tiles, stride, token, own, count, head, SIZE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Return keys or values (N, C) of the sequence's tokens of this step, from `own` on.

    The copy engine loads whole tiles; threads load elements, and zeros past the sequence's end.
    """
    if tiles is None:
        own_N = own + tl.arange(0, TILE)
        c_C = tl.arange(0, WIDTH)
        there_NC = (own_N < count)[:, None] & (c_C < SIZE)[None, :]
        x_NC = tl.load(base + own_N.to(tl.int64)[:, None] * stride + c_C[None, :], mask=there_NC, other=0.0)
    else:
        x_NC = tiles.load([token + own, head, 0]).reshape(TILE, WIDTH)
    return x_NC


def make_tiles(metadata: AttnMetadata, heads_per_kv: int, rows: int, num_tokens: int) -> Tensor:
    """Return the tiles (L, 8) of all prefilling sequences, int32 on the device; `num_tokens` is T.

    Fields: sequence, first row, first token, the sequence's tokens in this step, their first position. Long sequences
    come first, and within each the last rows, which see most keys: a long tile that starts last would keep the device
    waiting. A sequence's tiles stay together, so that its keys stay in the device's cache.
    """
    first = metadata.num_decodes
    starts = np.array(metadata.starts[first:], dtype=np.int64)
    counts = np.array(metadata.lengths[first:], dtype=np.int64) - starts
    tokens = first + np.cumsum(counts) - counts
    order = np.argsort(-(starts + counts), kind="stable")
    tiles = -(-counts[order] * heads_per_kv // rows)
    sequence_L = np.repeat(order, tiles)
    later_L = np.repeat(np.cumsum(tiles), tiles) - 1 - np.arange(len(sequence_L))
    table_L8 = np.zeros((len(sequence_L), 8), dtype=np.int32)
    fields = (sequence_L + first, later_L * rows, tokens[sequence_L], counts[sequence_L], starts[sequence_L])
    for column, field in enumerate(fields):
        table_L8[:, column] = field
    return torch.from_numpy(table_L8).to(metadata.lengths_B.device, non_blocking=True)


def make_tiles_on_device(metadata: AttnMetadata, heads_per_kv: int, rows: int, num_tokens: int) -> Tensor:
    """Return the tiles from numbers on the device, so that a CUDA graph may contain the computation.

    There are as many tiles as T tokens can need; unneeded tiles have no tokens.
    """
    assert metadata.starts_B is not None
    first, most = metadata.num_decodes, len(metadata.starts) - metadata.num_decodes
    bounds_B1, starts_B = metadata.cu_q_B1[first:], metadata.starts_B[first:]
    counts_B = bounds_B1[1:] - bounds_B1[:-1]
    stop_B = ((counts_B * heads_per_kv + rows - 1) // rows).cumsum(0)
    tile_L = torch.arange(-(-(num_tokens - first) * heads_per_kv // rows) + most, device=bounds_B1.device)
    sequence_L = torch.searchsorted(stop_B, tile_L, right=True)
    there_L = sequence_L < most
    sequence_L = sequence_L.clamp(max=most - 1)
    nothing_L = torch.zeros_like(tile_L)
    row_L = (stop_B[sequence_L] - 1 - tile_L) * rows
    fields = (sequence_L + first, row_L, bounds_B1[sequence_L], counts_B[sequence_L], starts_B[sequence_L])
    table = [torch.where(there_L, field, nothing_L) for field in fields] + [nothing_L] * 3
    return torch.stack(table, dim=1).int()


def make_ranges(metadata: AttnMetadata, *, whole: bool) -> Tensor | None:
    """Return, per token of the step, the first that no window hides and the end (2, T) of what it sees.

    Numbers count its sequence's tokens in this step. The end is that of its both-ways range, and the first the range's
    if ranges are seen whole; else both are the token's own. None if there are no such ranges.
    """
    if not any(metadata.both_ways):
        return None
    made = []
    for start, length, ranges in zip(metadata.starts, metadata.lengths, metadata.both_ways, strict=True):
        own = np.arange(length - start, dtype=np.int32)
        made_2T = np.stack((own, own + 1))
        for low, high in ranges:
            made_2T[1, low - start : high - start] = high - start
            if whole:
                made_2T[0, low - start : high - start] = low - start
        made.append(made_2T)
    return torch.from_numpy(np.concatenate(made, axis=1)).to(metadata.lengths_B.device, non_blocking=True)


def prefill(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out_THC: Tensor,
    kv: LayerKV,
    group: GroupMetadata,
    plan: PrefillPlan,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> None:
    """Attend for all sequences of the plan; writes their rows of `out_THC`. The prefix must be in the cache."""
    heads = q_THC.shape[1]
    block_size, kv_heads, size = kv.keys.shape[1:]
    v_size = kv.values.shape[3]
    shape = plan.shape
    k_tiles, v_tiles = _tiles_of(k_TKC, v_TKC, shape)
    _prefill[(plan.tiles_L8.shape[0] * kv_heads,)](
        q_THC,
        k_TKC,
        v_TKC,
        kv.keys,
        kv.values,
        out_THC,
        plan.tiles_L8,
        group.tables_BN,
        k_tiles,
        v_tiles,
        plan.ranges_2T,
        0 if plan.ranges_2T is None else plan.ranges_2T.shape[1],
        sinks_H,
        scale,
        softcap or 0.0,
        q_THC.stride(0),
        q_THC.stride(1),
        k_TKC.stride(0),
        k_TKC.stride(1),
        v_TKC.stride(0),
        v_TKC.stride(1),
        group.tables_BN.stride(0),
        kv_heads,
        heads // kv_heads,
        size,
        v_size,
        block_size,
        shape.fetch == "threads",
        group.window or 0,
        group.chunk or 0,
        softcap is not None,
        shape.rows,
        shape.keys,
        max(16, triton.next_power_of_2(size)),
        # Of narrower tiles that threads load, ptxas 12.8 (Triton 3.6) reads values at undefined addresses of shared
        # memory, where heads of keys are wider.
        max(16 if v_tiles is not None or size <= 16 else 32, triton.next_power_of_2(v_size)),
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )


def _tiles_of(
    k_TKC: Tensor, v_TKC: Tensor, shape: TileShape
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Return the copy engine's descriptors (keys of a tile, one head, C) of keys and values; None without it."""
    if shape.fetch == "threads" or not (_engine_can(k_TKC) and _engine_can(v_TKC)):
        return None, None
    k_tiles, v_tiles = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [shape.keys, 1, x.shape[2]]) for x in (k_TKC, v_TKC)
    )
    return k_tiles, v_tiles


def _engine_can(x_TKC: Tensor) -> bool:
    """Return whether the copy engine can load the tensor.

    It requires addresses and strides in multiples of 16 bytes; Triton requires sizes that are powers of two.
    """
    size, strides = x_TKC.shape[2], x_TKC.stride()[:2]
    return (
        size & (size - 1) == 0
        and x_TKC.data_ptr() % 16 == 0
        and all(s * x_TKC.element_size() % 16 == 0 for s in strides)
    )


def shape_of(size: int, element_bytes: int, shared_bytes: int, fetch: str) -> TileShape:
    """Return a tile shape for heads of `size` elements on a GPU with `shared_bytes` of shared memory per program."""
    row_bytes = max(16, triton.next_power_of_2(size)) * element_bytes
    large = shared_bytes >= 200_000
    if element_bytes == 4:
        return TileShape(32, 16, 4, 2) if row_bytes <= 256 else TileShape(16, 16, 4, 2)
    if fetch == "engine" and large and row_bytes <= 256:
        return TileShape(64, 64, 4, 3, fetch)
    if row_bytes <= 128:
        return TileShape(128, 128, 8, 3) if large else TileShape(64, 64, 4, 2)
    if row_bytes <= 256:
        return TileShape(128, 64, 8, 3) if large else TileShape(64, 32, 4, 2)
    if row_bytes <= 512:
        return TileShape(128, 64, 8, 2) if large else TileShape(32, 32, 4, 2)
    # Gemma 4's heads of 512: queries and two stages of keys and values fill a large GPU's shared memory.
    return TileShape(64, 32, 8, 2) if large else TileShape(32, 32, 4, 2)
