"""Decoding sequences that share their first blocks: what they share is read once for several of them.

Eight neighbours in the batch may share a prefix. One program then takes a part of it, one key-value head, and the
queries of all eight; their own positions stay with `triton_decode`, which also says how the lists are made:

    sequence 0   |      shared part 0      |      shared part 1      |own, item 0     |new
    sequence 1   |            "            |            "            |own, item 1 |new
    sequence 2   |            "            |            "            |own, item 2         |new

Each part of a sequence, shared or own, leaves its sums in that sequence's lines of the workspace, and whichever part
finishes last joins them.

Shapes: R rows, which are the query heads of one key-value head of eight sequences, padded; C head size; N keys of a
tile.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beheld.attention.backend import GroupMetadata, LayerKV, Sharing
from beheld.attention.triton_math import accumulate, asked, blocks_of, capped, join, products, unit, widened

NEIGHBOURS = 8
"""Sequences whose queries one program takes."""
SHARING = Sharing(neighbours=NEIGHBOURS, min_positions=512, min_total=300_000)
"""Sharing less does not pay for one more kernel in each layer: on an H100, with 16 heads of 128 over 2, attention of
256 sequences that share 1,024 positions takes 46 microseconds instead of 44, and 2,048 positions 54 instead of 79; 32
that share 2,048 take 26 instead of 18, and 64 that share 8,192 take 43 instead of 129."""
MAX_ROWS = 128
"""Query heads of a key-value head, times NEIGHBOURS: more do not fit into a program's registers."""
MIN_PART = 256
"""Positions; the parts of a shared prefix are no shorter."""
# Parts that are joined at a time, as in triton_decode.
_JOINED = 4


@triton.jit
def chunk_of(shared, max_parts, min_part, TILE: tl.constexpr):
    """Return the positions of a part of a shared prefix of `shared` positions."""
    return tl.maximum(tl.cdiv(tl.cdiv(shared, max_parts), TILE) * TILE, min_part)


@triton.jit(do_not_specialize=["table_row", "max_parts"], do_not_specialize_on_alignment=["tables_ptr"])
def _decode_shared(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    shared_ptr,
    lines_ptr,
    tables_ptr,
    acc_ptr,
    sums_ptr,
    arrived_ptr,
    scale,
    softcap,
    q_token,
    q_head,
    table_row,
    num_rows,
    max_parts,
    min_part,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program computes one part of a shared prefix and one key-value head for the sequences that share it."""
    head = tl.program_id(0)
    first_row = tl.program_id(1) // max_parts * SEQUENCES
    part = tl.program_id(1) % max_parts
    eight = tl.arange(0, SEQUENCES)
    shared = tl.max(tl.load(shared_ptr + first_row + eight, mask=first_row + eight < num_rows, other=0), 0)
    if shared == 0:
        return
    chunk = chunk_of(shared, max_parts, min_part, TILE)
    first = part * chunk
    if first >= shared:
        return
    stop = tl.minimum(first + chunk, shared)
    r_R = tl.arange(0, ROWS)
    row_R = first_row + r_R // GROUP
    inside_R = (r_R < SEQUENCES * GROUP) & (row_R < num_rows)
    member_R = tl.load(shared_ptr + row_R, mask=inside_R, other=0) > 0
    heads_R = head * GROUP + r_R % GROUP
    c_C = tl.arange(0, WIDTH)
    d_C = tl.arange(0, V_WIDTH)
    q_RC = tl.load(
        q_ptr + row_R.to(tl.int64)[:, None] * q_token + heads_R[:, None] * q_head + c_C[None, :],
        mask=member_R[:, None] & (c_C < SIZE)[None, :],
        other=0.0,
    )
    q_RC = asked(q_RC, keys_ptr)
    # All members have the same blocks there: the first member's table serves.
    owner = tl.min(tl.where(member_R, row_R, num_rows), 0)
    table_ptr = tables_ptr + owner.to(tl.int64) * table_row
    factor = unit(scale, SOFTCAP)
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([ROWS], tl.float32)
    acc_RC = tl.zeros([ROWS, V_WIDTH], tl.float32)
    block_N = blocks_of(table_ptr, first, stop, BLOCK_SIZE, TILE)
    for position in range(first, stop, TILE):
        next_N = blocks_of(table_ptr, position + TILE, stop, BLOCK_SIZE, TILE)
        position_N = position + tl.arange(0, TILE)
        live_N = position_N < stop
        line_N = (block_N * BLOCK_SIZE + position_N % BLOCK_SIZE) * KV_HEADS + head
        k_NC = tl.load(
            keys_ptr + line_N[:, None] * SIZE + c_C[None, :], mask=live_N[:, None] & (c_C < SIZE)[None, :], other=0.0
        )
        v_NC = tl.load(
            values_ptr + line_N[:, None] * V_SIZE + d_C[None, :],
            mask=live_N[:, None] & (d_C < V_SIZE)[None, :],
            other=0.0,
        )
        k_NC, v_NC = widened(k_NC, q_ptr), widened(v_NC, q_ptr)
        s_RN = capped(products(q_RC, k_NC), scale, softcap, SOFTCAP)
        s_RN = tl.where(live_N[None, :], s_RN, float("-inf"))
        m_R, l_R, acc_RC = accumulate(s_RN, v_NC, m_R, l_R, acc_RC, factor, False)
        block_N = next_N
    first_line_R = tl.load(lines_ptr + row_R * 2, mask=member_R, other=0)
    line_R = ((first_line_R + part) * KV_HEADS + head) * GROUP + r_R % GROUP
    tl.store(
        acc_ptr + line_R[:, None] * V_SIZE + d_C[None, :], acc_RC, mask=member_R[:, None] & (d_C < V_SIZE)[None, :]
    )
    tl.store(sums_ptr + line_R * 2, m_R * factor, mask=member_R)
    tl.store(sums_ptr + line_R * 2 + 1, l_R, mask=member_R)
    # All threads' results must be written before one thread signals that they are.
    tl.debug_barrier()
    own_R = tl.arange(0, HEAD_ROWS)
    for sequence in range(SEQUENCES):
        row = first_row + sequence
        if tl.load(shared_ptr + row, mask=row < num_rows, other=0) > 0:
            parts = tl.load(lines_ptr + row * 2 + 1)
            counter_ptr = arrived_ptr + row * KV_HEADS + head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1:
                _, total_R, joined_RC = join(
                    acc_ptr,
                    sums_ptr,
                    tl.load(lines_ptr + row * 2),
                    1,
                    parts,
                    head,
                    KV_HEADS,
                    GROUP,
                    V_SIZE,
                    HEAD_ROWS,
                    V_WIDTH,
                    PARTS,
                )
                at_RC = ((row * KV_HEADS + head) * GROUP + own_R)[:, None] * V_SIZE + d_C[None, :]
                tl.store(
                    out_ptr + at_RC,
                    joined_RC / total_R[:, None],
                    mask=(own_R < GROUP)[:, None] & (d_C < V_SIZE)[None, :],
                )
                tl.store(counter_ptr, 0)


def max_parts_of(num_rows: int, kv_heads: int, num_programs: int) -> int:
    """Return the most parts of a shared prefix that keep about `num_programs` programs busy."""
    return max(1, min(16, num_programs // (kv_heads * triton.cdiv(num_rows, NEIGHBOURS))))


def decode_shared(
    q_THC: Tensor,
    out_THC: Tensor,
    kv: LayerKV,
    group: GroupMetadata,
    shared_B: Tensor,
    lines_B2: Tensor,
    arrived_BK: Tensor,
    workspace: tuple[Tensor, Tensor],
    max_parts: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Attend to the shared prefixes of the first rows of the step.

    Args:
        shared_B: int32, positions that each sequence shares with neighbours; 0 for none. Those of eight neighbours
            (sequences 8i to 8i + 7) that are not 0 are equal.
        lines_B2: int32, for each sequence its first line in the workspace and how many it has.
    """
    heads = q_THC.shape[1]
    block_size, kv_heads, size = kv.keys.shape[1:]
    v_size = kv.values.shape[3]
    per_head, num_rows = heads // kv_heads, len(shared_B)
    rows = max(16, triton.next_power_of_2(NEIGHBOURS * per_head))
    width, v_width = max(16, triton.next_power_of_2(size)), max(16, triton.next_power_of_2(v_size))
    tile, warps, stages = shape_of(rows, width, wide_bytes(q_THC, kv))
    _decode_shared[(kv_heads, triton.cdiv(num_rows, NEIGHBOURS) * max_parts)](
        q_THC,
        kv.keys,
        kv.values,
        out_THC,
        shared_B,
        lines_B2,
        group.tables_BN,
        *workspace,
        arrived_BK,
        scale,
        softcap or 0.0,
        *q_THC.stride()[:2],
        group.tables_BN.stride(0),
        num_rows,
        max_parts,
        MIN_PART,
        kv_heads,
        per_head,
        size,
        v_size,
        block_size,
        softcap is not None,
        NEIGHBOURS,
        rows,
        max(16, triton.next_power_of_2(per_head)),
        tile,
        width,
        v_width,
        _JOINED,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=True,
    )


def wide_bytes(q_THC: Tensor, kv: LayerKV) -> int:
    """Return the bytes of a number of a key or value once it is read; see triton_math.widened."""
    return q_THC.element_size() if kv.keys.element_size() == 1 else kv.keys.element_size()


def shape_of(rows: int, width: int, element_bytes: int) -> tuple[int, int, int]:
    """Return keys per tile, warps and pipeline stages for `rows` queries of `width` elements.

    With tiles of 32 keys more programs run concurrently than with 64: 85 microseconds instead of 103 for 256 sequences
    that share 2,048 positions, with 7B's heads on an H100.
    """
    warps = 8 if rows > 64 or width > 128 else 4
    return (16, warps, 2) if element_bytes == 4 else (32, warps, 3 if width <= 128 else 2)
