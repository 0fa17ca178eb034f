"""Decoding on the paged cache: one query per sequence, its keys split over programs that join their results.

Shapes: B sequences, W work items, K key-value heads, H query heads, G = H / K of them in a group, C head size, R = G
padded for the matrix units, N keys of a tile, P parts.

A work item is a range of positions of one sequence. The device makes the list of items from `lengths_B`, once per step,
so that one CUDA graph of the launches serves any lengths:

    sequence 0   |item 0    |item 1    |item 2  |new      a part reads chunk positions of the cache;
    sequence 1   |item 3   |new                           the last one also takes the step's own key and value,
    sequence 2   |new                        (item 4)     and writes them to the cache: no store kernel runs before

Parts of one sequence leave their sums in a workspace, and the last part to finish joins them: one launch per layer.
Where a sequence has many parts, the last of each few neighbours joins these, and the last of all what was joined.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.attention.backend import GroupMetadata, LayerKV
from beheld.attention.triton_math import (
    accumulate,
    asked,
    blocks_of,
    capped,
    join,
    products,
    stored,
    sunk,
    unit,
    widened,
)
from beheld.attention.triton_shared import (
    MAX_ROWS,
    MIN_PART,
    NEIGHBOURS,
    chunk_of,
    decode_shared,
    max_parts_of,
    wide_bytes,
)
from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait

# Fields of an item: row, first and stop of its positions, its number among its row's parts, number of parts, the row's
# first line in the workspace, how many parts are joined together. Eight numbers fill one memory sector.
_FIELDS = 8
# Positions, of which parts are multiples. A shorter part than the second costs more to join than it saves in reading;
# with few sequences the device has idle programs to spare.
_TILE = 64
_MIN_CHUNK = 128
_FEW = 4
# So many parts of a row one program joins, and more are joined in two rounds.
_AT_ONCE = 16
_MAX_PARTS = 256
# A row that shares a prefix has all its parts joined at once, and no more of its own.
_MAX_OWN_PARTS = 32
# Parts that are joined at a time, limited by registers.
_JOINED = 4
_NO_WINDOW = 1 << 30
# Pipeline stages where block numbers are loaded a tile ahead. More hold a second tile, which pays for no length.
_STAGES_AHEAD = 2


@dataclass(eq=False)
class SharedPlan:
    """Prefixes that neighbours share.

    Attributes:
        shared_B, lines_B2: see decode_shared.
        max_parts: the most parts of a prefix.
    """

    shared_B: Tensor
    lines_B2: Tensor
    max_parts: int


@dataclass(eq=False)
class DecodePlan:
    """What all layers of a group share in one step.

    Attributes:
        items_W8: the work items, int32; made on the device.
        num_lines: lines of the workspace, one for each part. Without shared prefixes item i has line i.
        arrived_BK: the number of finished parts, zero between launches, or of what was joined of them.
        joined_LK: for the first line of parts that are joined together, how many of them are finished.
        acc_WHC, sums_WH2: workspace for the parts' results, made by the first layer, which knows its shape.
        shared: what sequences share in this step; None if it is not asked for.
        lines_B2: a row's first line and its number of parts, for a kernel that joins them; None unless asked for.
        settled: whether the items and block tables were made before the step's layers, with a kernel in between that
            does not start early, such as the embeddings'. Waiting for the previous kernel is not enough if it signals
            before its end.
        crowded: the rows alone, one part each, take more than half of the requested programs; see shape_of.
    """

    items_W8: Tensor
    num_lines: int
    arrived_BK: Tensor
    joined_LK: Tensor
    crowded: bool
    shared: SharedPlan | None = None
    lines_B2: Tensor | None = None
    workspace: tuple[Tensor, Tensor] | None = None
    settled: bool = False


@triton.jit
def _write(items_ptr, row, part, there, item, first, chunk, stop, before, parts, line, together):
    """Write the fields of items, of parts of a row or of rows."""
    at = items_ptr + (item + part) * 8
    tl.store(at + 0, row, mask=there)
    tl.store(at + 1, first + part * chunk, mask=there)
    tl.store(at + 2, tl.minimum(first + (part + 1) * chunk, stop), mask=there)
    tl.store(at + 3, before + part, mask=there)
    tl.store(at + 4, parts, mask=there)
    tl.store(at + 5, line, mask=there)
    tl.store(at + 6, together, mask=there)


@triton.jit
def _of(numbers_B, own_B):
    """Return one row's number."""
    return tl.sum(tl.where(own_B, numbers_B, 0), 0)


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_items", "num_counters", "target_items", "window", "span", "min_chunk"),
        *("max_shared_parts", "min_shared_part", "at_once"),
    ]
)
def _plan(
    lengths_ptr,
    items_ptr,
    arrived_ptr,
    shared_ptr,
    lines_ptr,
    num_rows,
    num_items,
    num_counters,
    target_items,
    window,
    span,
    min_chunk,
    max_shared_parts,
    min_shared_part,
    at_once,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    COUNTERS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program cuts the cached positions of all rows, except shared ones, into about `target_items` items."""
    row_B = tl.arange(0, ROWS)
    inside_B = row_B < num_rows
    length_B = tl.load(lengths_ptr + row_B, mask=inside_B, other=1)
    stop_B = tl.maximum(length_B - 1, 0)
    # Within its window, a query sees only positions from the last multiple of its span on.
    first_B = tl.maximum(length_B - window, stop_B // span * span)
    if shared_ptr is not None:
        first_B = tl.load(shared_ptr + row_B, mask=inside_B, other=0)
    seen_B = tl.maximum(stop_B - first_B, 0)
    share = tl.cdiv(tl.sum(seen_B, 0), target_items)
    least = tl.maximum(tl.cdiv(share, TILE), min_chunk // TILE)
    # Parts of the mean length are more than programs, since the last one of a row is shorter, and those that are too
    # many begin when all others end. So the first of sixteen lengths is taken that makes as many as programs or a few
    # less; where none does, because rows are few or many, the mean.
    chunk_S = (least + tl.arange(0, 16) * tl.cdiv(least, 16)) * TILE
    parts_S = tl.sum(tl.maximum(tl.cdiv(seen_B[None, :], chunk_S[:, None]), 1), 1) - (ROWS - num_rows)
    fits_S = (parts_S <= target_items) & (4 * parts_S >= 3 * target_items)
    chunk = tl.min(tl.where(fits_S, chunk_S, 1 << 30), 0)
    chunk = tl.where(chunk < (1 << 30), chunk, least * TILE)
    # Parts of one row are equally long, in whole tiles.
    parts_B = tl.minimum(tl.maximum(tl.cdiv(seen_B, chunk), 1), MAX_PARTS)
    chunk_B = tl.cdiv(tl.cdiv(seen_B, parts_B), TILE) * TILE
    chunk_B = tl.maximum(chunk_B, TILE)
    parts_B = tl.where(inside_B, tl.maximum(tl.cdiv(seen_B, chunk_B), 1), 0)
    item_B = tl.cumsum(parts_B, 0) - parts_B
    line_B, before_B, all_B = item_B, tl.zeros_like(row_B), parts_B
    if shared_ptr is not None:
        before_B = tl.cdiv(first_B, chunk_of(first_B, max_shared_parts, min_shared_part, TILE))
        all_B = parts_B + before_B
        line_B = tl.cumsum(all_B, 0) - all_B
    if lines_ptr is not None:
        tl.store(lines_ptr + row_B * 2, line_B, mask=inside_B)
        tl.store(lines_ptr + row_B * 2 + 1, all_B, mask=inside_B)
    # About as many lots as parts in a lot; each number is a multiple of those that are loaded at a time.
    root_B = tl.ceil(tl.sqrt(all_B.to(tl.float32))).to(tl.int32)
    together_B = tl.where(all_B > at_once, tl.maximum(tl.cdiv(root_B, 4) * 4, 8), all_B)
    most = tl.max(parts_B, 0)
    # All parts of a row at a time cost eight sums a row, and a part of all rows at a time none.
    if num_rows * 8 < most:
        part_W = tl.arange(0, ITEMS)
        for row in range(num_rows):
            own_B = row_B == row
            _write(
                items_ptr,
                row,
                part_W,
                part_W < _of(parts_B, own_B),
                _of(item_B, own_B),
                _of(first_B, own_B),
                _of(chunk_B, own_B),
                _of(stop_B, own_B),
                _of(before_B, own_B),
                _of(all_B, own_B),
                _of(line_B, own_B),
                _of(together_B, own_B),
            )
    else:
        for part in range(most):
            _write(
                items_ptr,
                row_B,
                part,
                part < parts_B,
                item_B,
                first_B,
                chunk_B,
                stop_B,
                before_B,
                all_B,
                line_B,
                together_B,
            )
    spare_W = tl.arange(0, ITEMS)
    tl.store(
        items_ptr + spare_W * 8 + 4,
        tl.zeros_like(spare_W),
        mask=(spare_W >= tl.sum(parts_B, 0)) & (spare_W < num_items),
    )
    counter = tl.arange(0, COUNTERS)
    tl.store(arrived_ptr + counter, tl.zeros_like(counter), mask=counter < num_counters)


@triton.jit
def _tile(
    q_ptr,
    keys_ptr,
    values_ptr,
    block_N,
    position,
    stop,
    head,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
):
    """Return keys (N, C) and values of positions from `position` to `stop`, zeros after it; see `widened`.

    block_N: the positions' blocks; see `blocks_of`.
    """
    c_C = tl.arange(0, WIDTH)
    d_C = tl.arange(0, V_WIDTH)
    position_N = position + tl.arange(0, TILE)
    live_N = position_N < stop
    line_N = (block_N * BLOCK_SIZE + position_N % BLOCK_SIZE) * KV_HEADS + head
    k_NC = tl.load(
        keys_ptr + line_N[:, None] * SIZE + c_C[None, :], mask=live_N[:, None] & (c_C < SIZE)[None, :], other=0.0
    )
    v_NC = tl.load(
        values_ptr + line_N[:, None] * V_SIZE + d_C[None, :], mask=live_N[:, None] & (d_C < V_SIZE)[None, :], other=0.0
    )
    return widened(k_NC, q_ptr), widened(v_NC, q_ptr)


@triton.jit
def _take(
    q_RC,
    k_NC,
    v_NC,
    position,
    stop,
    m_R,
    l_RN,
    acc_RC,
    factor,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add a tile to the running maximum, sums and weighted values."""
    s_RN = capped(products(q_RC, k_NC), scale, softcap, SOFTCAP)
    s_RN = tl.where((position + tl.arange(0, TILE) < stop)[None, :], s_RN, float("-inf"))
    return accumulate(s_RN, v_NC, m_R, l_RN, acc_RC, factor, False, True)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["slots_ptr", "tables_ptr"])
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    items_ptr,
    slots_ptr,
    tables_ptr,
    acc_ptr,
    sums_ptr,
    arrived_ptr,
    joined_ptr,
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
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One program computes one item and one key-value head with all its query heads.

    EARLY: this kernel may start before the previous one ends, and lets the next one start early. AHEAD: it reads its
    first tile before it waits for the previous kernel.
    """
    if EARLY:
        gdc_launch_dependents()
        if not AHEAD:
            gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(items_ptr + item * 8 + 0)
    first = tl.load(items_ptr + item * 8 + 1)
    stop = tl.load(items_ptr + item * 8 + 2)
    part = tl.load(items_ptr + item * 8 + 3)
    parts = tl.load(items_ptr + item * 8 + 4)
    first_line = tl.load(items_ptr + item * 8 + 5)
    together = tl.load(items_ptr + item * 8 + 6)
    if parts == 0:
        return
    heads_R = tl.arange(0, ROWS)
    c_C = tl.arange(0, WIDTH)
    d_C = tl.arange(0, V_WIDTH)
    inside_RC = (heads_R < GROUP)[:, None] & (c_C < SIZE)[None, :]
    inside_RD = (heads_R < GROUP)[:, None] & (d_C < V_SIZE)[None, :]
    table_ptr = tables_ptr + row.to(tl.int64) * table_row
    if AHEAD:
        # Safe to read before waiting: earlier steps stored it.
        block_N = blocks_of(table_ptr, first, stop, BLOCK_SIZE, TILE)
        k_NC, v_NC = _tile(
            q_ptr,
            keys_ptr,
            values_ptr,
            block_N,
            first,
            stop,
            head,
            KV_HEADS,
            SIZE,
            V_SIZE,
            BLOCK_SIZE,
            TILE,
            WIDTH,
            V_WIDTH,
        )
        block_N = blocks_of(table_ptr, first + TILE, stop, BLOCK_SIZE, TILE)
        if EARLY:
            gdc_wait()
    q_RC = tl.load(
        q_ptr + row.to(tl.int64) * q_token + (head * GROUP + heads_R)[:, None] * q_head + c_C[None, :],
        mask=inside_RC,
        other=0.0,
    )
    # The last part stores the step's key and value, and adds them to its sums.
    last = (part == parts - 1).to(tl.int32)
    own_C = c_C < SIZE * last
    own_D = d_C < V_SIZE * last
    own_k_C = tl.load(k_ptr + row.to(tl.int64) * k_token + head * k_head + c_C, mask=own_C, other=0.0)
    own_v_C = tl.load(v_ptr + row.to(tl.int64) * v_token + head * v_head + d_C, mask=own_D, other=0.0)
    own_k_C, own_v_C = stored(own_k_C, keys_ptr), stored(own_v_C, values_ptr)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    # Padding has slots of the null block, which stays unchanged.
    if slot >= BLOCK_SIZE:
        tl.store(keys_ptr + (slot * KV_HEADS + head) * SIZE + c_C, own_k_C, mask=own_C)
        tl.store(values_ptr + (slot * KV_HEADS + head) * V_SIZE + d_C, own_v_C, mask=own_D)
    own_k_C, own_v_C = widened(own_k_C, q_ptr), widened(own_v_C, q_ptr)
    factor = unit(scale, SOFTCAP)
    s_R = capped(tl.sum(q_RC.to(tl.float32) * own_k_C.to(tl.float32)[None, :], 1), scale, softcap, SOFTCAP)
    most_R = s_R
    if sinks_ptr is not None:
        sink_R = sunk(sinks_ptr, head * GROUP + heads_R, heads_R < GROUP, factor)
        most_R = tl.maximum(s_R, sink_R)
    m_R = tl.where(last > 0, most_R, float("-inf"))
    # Summing over a tile's keys crosses warps and costs a barrier, so sums per key are kept until the end.
    l_RN = tl.zeros([ROWS, TILE], tl.float32)
    acc_RC = tl.zeros([ROWS, V_WIDTH], tl.float32)
    q_RC = asked(q_RC, keys_ptr)
    if AHEAD:
        # A part without positions is its row's only one, and its maximum is already its new key's.
        m_R, l_RN, acc_RC = _take(
            q_RC, k_NC, v_NC, first, stop, m_R, l_RN, acc_RC, factor, scale, softcap, SOFTCAP, TILE
        )
        first += TILE
    for position in range(first, stop, TILE):
        if AHEAD:
            next_N = blocks_of(table_ptr, position + TILE, stop, BLOCK_SIZE, TILE)
        else:
            # Where many programs run, the numbers of a tile ahead cost more registers than they save time.
            block_N = blocks_of(table_ptr, position, stop, BLOCK_SIZE, TILE)
        k_NC, v_NC = _tile(
            q_ptr,
            keys_ptr,
            values_ptr,
            block_N,
            position,
            stop,
            head,
            KV_HEADS,
            SIZE,
            V_SIZE,
            BLOCK_SIZE,
            TILE,
            WIDTH,
            V_WIDTH,
        )
        m_R, l_RN, acc_RC = _take(
            q_RC, k_NC, v_NC, position, stop, m_R, l_RN, acc_RC, factor, scale, softcap, SOFTCAP, TILE
        )
        if AHEAD:
            block_N = next_N
    # The new value is added last, its weight rounded like all others.
    p_R = tl.where(last > 0, tl.exp2((s_R - m_R) * factor), 0.0)
    l_R = tl.sum(l_RN, 1) + p_R
    if sinks_ptr is not None:
        l_R += tl.where(last > 0, tl.exp2((sink_R - m_R) * factor), 0.0)
    acc_RC += p_R.to(own_v_C.dtype).to(tl.float32)[:, None] * own_v_C.to(tl.float32)[None, :]
    out_RC = out_ptr + ((row.to(tl.int64) * KV_HEADS + head) * GROUP + heads_R)[:, None] * V_SIZE + d_C[None, :]
    if parts == 1:
        tl.store(out_RC, acc_RC / l_R[:, None], mask=inside_RD)
    else:
        line_R = ((first_line + part) * KV_HEADS + head) * GROUP + heads_R
        tl.store(acc_ptr + line_R[:, None] * V_SIZE + d_C[None, :], acc_RC, mask=inside_RD)
        tl.store(sums_ptr + line_R * 2, m_R * factor, mask=heads_R < GROUP)
        tl.store(sums_ptr + line_R * 2 + 1, l_R, mask=heads_R < GROUP)
        # All threads' results must be written before one thread signals that they are.
        tl.debug_barrier()
        counter_ptr = arrived_ptr + row * KV_HEADS + head
        if together == parts:
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1:
                m_R, l_R, acc_RC = join(
                    acc_ptr, sums_ptr, first_line, 1, parts, head, KV_HEADS, GROUP, V_SIZE, ROWS, V_WIDTH, PARTS
                )
                tl.store(out_RC, acc_RC / l_R[:, None], mask=inside_RD)
                tl.store(counter_ptr, 0)
        else:
            lot = part // together
            lot_line = first_line + lot * together
            lot_ptr = joined_ptr + lot_line * KV_HEADS + head
            count = tl.minimum(together, parts - lot * together)
            if tl.atomic_add(lot_ptr, 1, sem="acq_rel") == count - 1:
                m_R, l_R, acc_RC = join(
                    acc_ptr, sums_ptr, lot_line, 1, count, head, KV_HEADS, GROUP, V_SIZE, ROWS, V_WIDTH, PARTS
                )
                tl.store(lot_ptr, 0)
                # All threads must have read the lot's first line before it is written.
                tl.debug_barrier()
                line_R = (lot_line * KV_HEADS + head) * GROUP + heads_R
                tl.store(acc_ptr + line_R[:, None] * V_SIZE + d_C[None, :], acc_RC, mask=inside_RD)
                tl.store(sums_ptr + line_R * 2, m_R, mask=heads_R < GROUP)
                tl.store(sums_ptr + line_R * 2 + 1, l_R, mask=heads_R < GROUP)
                tl.debug_barrier()
                lots = tl.cdiv(parts, together)
                if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == lots - 1:
                    m_R, l_R, acc_RC = join(
                        acc_ptr,
                        sums_ptr,
                        first_line,
                        together,
                        lots,
                        head,
                        KV_HEADS,
                        GROUP,
                        V_SIZE,
                        ROWS,
                        V_WIDTH,
                        PARTS,
                    )
                    tl.store(out_RC, acc_RC / l_R[:, None], mask=inside_RD)
                    tl.store(counter_ptr, 0)


def plan_decode(
    group: GroupMetadata,
    lengths_B: Tensor,
    num_rows: int,
    kv_heads: int,
    num_programs: int,
    shared_B: Tensor | None = None,
    joined_apart: int = 0,
) -> DecodePlan:
    """Cut the first `num_rows` sequences' cached positions into items for about `num_programs` programs.

    Nothing is read back, and all shapes follow from `num_rows` and `num_programs`.

    Args:
        joined_apart: the most parts of a row if a kernel of its own joins them; 0 if the last part does.
    """
    device = lengths_B.device
    target = max(1, num_programs // kv_heads)
    num_items = num_rows + target
    items_W8 = torch.empty((num_items, _FIELDS), dtype=torch.int32, device=device)
    # Joined in two rounds are only rows that this kernel alone computes.
    num_counters = num_rows if joined_apart or shared_B is not None else num_rows + num_items
    counters_NK = torch.empty((num_counters, kv_heads), dtype=torch.int32, device=device)
    arrived_BK, joined_LK = counters_NK[:num_rows], counters_NK[num_rows:]
    shared, num_lines = None, num_items
    lines_B2 = torch.empty((num_rows, 2), dtype=torch.int32, device=device) if joined_apart else None
    if shared_B is not None:
        max_parts = max_parts_of(num_rows, kv_heads, num_programs)
        lines_B2 = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
        shared = SharedPlan(shared_B, lines_B2, max_parts)
        num_lines += num_rows * max_parts
    _plan[(1,)](
        lengths_B,
        items_W8,
        counters_NK,
        None if shared is None else shared.shared_B,
        lines_B2 if shared is None else shared.lines_B2,
        num_rows,
        num_items,
        num_counters * kv_heads,
        target,
        group.window or _NO_WINDOW,
        group.chunk or _NO_WINDOW,
        _TILE if num_rows <= _FEW else _MIN_CHUNK,
        1 if shared is None else shared.max_parts,
        MIN_PART,
        _NO_WINDOW if joined_apart or shared is not None else _AT_ONCE,
        _padded(num_rows),
        _padded(num_items),
        _padded(num_counters * kv_heads),
        joined_apart or (_MAX_PARTS if shared is None else _MAX_OWN_PARTS),
        _TILE,
        num_warps=4,
        enable_fp_fusion=True,
    )
    crowded = 2 * num_rows * kv_heads > num_programs
    return DecodePlan(items_W8, num_lines, arrived_BK, joined_LK, crowded, shared=shared, lines_B2=lines_B2)


def can_share(heads: int, kv_heads: int, size: int) -> bool:
    """True if a program has room for the queries of neighbours, in registers and in shared memory."""
    rows = triton.next_power_of_2(NEIGHBOURS * (heads // kv_heads))
    return rows <= MAX_ROWS and size <= 256 and rows * triton.next_power_of_2(size) <= MAX_ROWS * 128


def _padded(count: int) -> int:
    """Round `count` up to one of few sizes: each size is a kernel to compile."""
    return max(256, triton.next_power_of_2(count))


def decode(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out_THC: Tensor,
    kv: LayerKV,
    group: GroupMetadata,
    plan: DecodePlan,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None = None,
    *,
    early: bool,
) -> None:
    """Store and attend for the first rows of the step, one token each; writes those rows of `out_THC`.

    Args:
        early: start before the previous kernel ends; only if the hardware can.
    """
    heads = q_THC.shape[1]
    block_size, kv_heads, size = kv.keys.shape[1:]
    v_size = kv.values.shape[3]
    width, v_width = max(16, triton.next_power_of_2(size)), max(16, triton.next_power_of_2(v_size))
    tile, warps, stages = shape_of(width, wide_bytes(q_THC, kv), plan.crowded)
    if plan.settled:
        stages = _STAGES_AHEAD
    workspace = workspace_of(plan, heads, v_size, q_THC.device)
    if plan.shared is not None:
        shared = plan.shared
        decode_shared(
            *(q_THC, out_THC, kv, group, shared.shared_B, shared.lines_B2, plan.arrived_BK, workspace),
            *(shared.max_parts, scale, softcap),
        )
    _decode[(kv_heads, plan.items_W8.shape[0])](
        q_THC,
        k_TKC,
        v_TKC,
        kv.keys,
        kv.values,
        out_THC,
        plan.items_W8,
        group.slots_T,
        group.tables_BN,
        *workspace,
        plan.arrived_BK,
        plan.joined_LK,
        sinks_H,
        scale,
        softcap or 0.0,
        *q_THC.stride()[:2],
        *k_TKC.stride()[:2],
        *v_TKC.stride()[:2],
        group.tables_BN.stride(0),
        kv_heads,
        heads // kv_heads,
        size,
        v_size,
        block_size,
        softcap is not None,
        max(16, triton.next_power_of_2(heads // kv_heads)),
        tile,
        width,
        v_width,
        _JOINED,
        early,
        plan.settled,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if early else {}),
    )


def workspace_of(plan: DecodePlan, heads: int, v_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the workspace for parts' results, made by a group's first layer."""
    if plan.workspace is None:
        plan.workspace = (
            torch.empty((plan.num_lines, heads, v_size), dtype=torch.float32, device=device),
            torch.empty((plan.num_lines, heads, 2), dtype=torch.float32, device=device),
        )
    return plan.workspace


def shape_of(width: int, element_bytes: int, crowded: bool) -> tuple[int, int, int]:
    """Return keys per tile, warps and pipeline stages for heads of `width` elements; fits every GPU's shared memory.

    With many programs, fewer warps each let more of them run concurrently, and some read while others begin or end: on
    an H200 with 7B's heads, 256 rows of 350 positions take 53 microseconds instead of 60, and 64 rows of 4000 take 128
    instead of 160. Heads of 64 gain in some cases and lose in others.
    """
    if element_bytes == 4:
        return 16, 4, 3
    warps = 2 if crowded and 64 < width <= 256 else 4
    return (64, warps, 3) if width <= 128 else (32, warps, 3)
