"""Latent attention on the paged cache: queries that are absorbed into the latents, for decoding and after prefixes.

All heads read the same row of a position, whose first numbers are also its value: one load serves as key and as value.
Heads are cut into tiles for the matrix units; the work of decoding sequences is cut as in triton_decode. A single row's
queries are absorbed, and its latents raised, by kernels that read their matrices before the previous kernel ends. All
four kernels of such a row signal first and then wait (models/one_row_kernel.py says why).

Shapes as in attention/latent.py; of a tile, G heads, padded to R rows, and N positions; A the latent's size, B the
rotary key's.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beheld.attention.backend import GroupMetadata, LayerKV, LayerLatent
from beheld.attention.latent import LatentTurn
from beheld.attention.triton_decode import DecodePlan, workspace_of
from beheld.attention.triton_math import accumulate, blocks_of, products, unit
from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait

# All heads of a latent are one program's, so a long row needs many parts to use all multiprocessors, and its parts are
# joined by programs of their own: with 20 heads, one row of 4,096 positions takes 16 microseconds on an H200, where 32
# parts that the last one joined took 38.
MAX_PARTS = 128
_PROGRAMS_PER_SM = 2
_JOINED_NUMBERS = 128
_JOINED_AT_ONCE = 32
_MOST_HEADS = 32
# Numbers of a latent, and of a value, that a program of a single row computes.
_ABSORBED, _RAISED = 64, 16


@triton.jit
def _rows(
    cache_ptr,
    block_N,
    position,
    stop,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr,
):
    """Return latents (N, A) and rotary keys (N, B) of positions from `position` to `stop`, zeros after it.

    block_N: see triton_math.blocks_of.
    """
    a_A = tl.arange(0, WIDTH)
    b_B = tl.arange(0, ROTARY_WIDTH)
    position_N = position + tl.arange(0, TILE)
    live_N = position_N < stop
    line_N1 = ((block_N * BLOCK_SIZE + position_N % BLOCK_SIZE) * (RANK + ROTARY))[:, None]
    latent_NA = tl.load(cache_ptr + line_N1 + a_A[None, :], mask=live_N[:, None] & (a_A < RANK)[None, :], other=0.0)
    rotary_NB = tl.load(
        cache_ptr + line_N1 + RANK + b_B[None, :], mask=live_N[:, None] & (b_B < ROTARY)[None, :], other=0.0
    )
    return latent_NA, rotary_NB


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["slots_ptr", "tables_ptr"])
def _decode(
    q_ptr,
    own_ptr,
    cache_ptr,
    out_ptr,
    items_ptr,
    slots_ptr,
    tables_ptr,
    acc_ptr,
    sums_ptr,
    scale,
    q_token,
    q_head,
    own_token,
    table_row,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes one item and one tile of heads. Without `own_ptr`, the step's latents are in the cache."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(items_ptr + item * 8 + 0)
    first = tl.load(items_ptr + item * 8 + 1)
    stop = tl.load(items_ptr + item * 8 + 2)
    part = tl.load(items_ptr + item * 8 + 3)
    parts = tl.load(items_ptr + item * 8 + 4)
    if parts == 0:
        return
    heads_R = tl.arange(0, ROWS)
    a_A = tl.arange(0, WIDTH)
    b_B = tl.arange(0, ROTARY_WIDTH)
    there_R1 = (heads_R < GROUP)[:, None]
    q_R1 = q_ptr + row.to(tl.int64) * q_token + ((tile * GROUP + heads_R) * q_head)[:, None]
    q_RA = tl.load(q_R1 + a_A[None, :], mask=there_R1 & (a_A < RANK)[None, :], other=0.0)
    q_RB = tl.load(q_R1 + RANK + b_B[None, :], mask=there_R1 & (b_B < ROTARY)[None, :], other=0.0)
    last = (part == parts - 1).to(tl.int32)
    factor = unit(scale, False)
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    if own_ptr is not None:
        # The last part stores the step's latent, and adds it to its sums.
        own_A = a_A < RANK * last
        own_B = b_B < ROTARY * last
        line_ptr = own_ptr + row.to(tl.int64) * own_token
        new_A = tl.load(line_ptr + a_A, mask=own_A, other=0.0).to(cache_ptr.dtype.element_ty)
        new_B = tl.load(line_ptr + RANK + b_B, mask=own_B, other=0.0).to(cache_ptr.dtype.element_ty)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        # Padding has slots of the null block, which stays unchanged. The heads' tiles all write the same numbers.
        if slot >= BLOCK_SIZE:
            tl.store(cache_ptr + slot * (RANK + ROTARY) + a_A, new_A, mask=own_A)
            tl.store(cache_ptr + slot * (RANK + ROTARY) + RANK + b_B, new_B, mask=own_B)
        s_R = tl.sum(q_RA.to(tl.float32) * new_A.to(tl.float32)[None, :], 1)
        s_R += tl.sum(q_RB.to(tl.float32) * new_B.to(tl.float32)[None, :], 1)
        m_R = tl.where(last > 0, s_R, float("-inf"))
    else:
        stop += last
    l_RN = tl.zeros([ROWS, TILE], tl.float32)
    acc_RA = tl.zeros([ROWS, WIDTH], tl.float32)
    q_RA = q_RA.to(cache_ptr.dtype.element_ty)
    q_RB = q_RB.to(cache_ptr.dtype.element_ty)
    table_ptr = tables_ptr + row.to(tl.int64) * table_row
    block_N = blocks_of(table_ptr, first, stop, BLOCK_SIZE, TILE)
    for position in range(first, stop, TILE):
        next_N = blocks_of(table_ptr, position + TILE, stop, BLOCK_SIZE, TILE)
        latent_NA, rotary_NB = _rows(
            cache_ptr, block_N, position, stop, RANK, ROTARY, BLOCK_SIZE, TILE, WIDTH, ROTARY_WIDTH
        )
        block_N = next_N
        s_RN = products(q_RA, latent_NA) + products(q_RB, rotary_NB)
        s_RN = tl.where((position + tl.arange(0, TILE) < stop)[None, :], s_RN, float("-inf"))
        m_R, l_RN, acc_RA = accumulate(s_RN, latent_NA, m_R, l_RN, acc_RA, factor, False, True)
    l_R = tl.sum(l_RN, 1)
    if own_ptr is not None:
        p_R = tl.where(last > 0, tl.exp2((s_R - m_R) * factor), 0.0)
        l_R += p_R
        acc_RA += p_R.to(new_A.dtype).to(tl.float32)[:, None] * new_A.to(tl.float32)[None, :]
    inside_RA = there_R1 & (a_A < RANK)[None, :]
    out_RA = out_ptr + ((row.to(tl.int64) * TILES + tile) * GROUP + heads_R)[:, None] * RANK + a_A[None, :]
    if parts == 1:
        tl.store(out_RA, acc_RA / l_R[:, None], mask=inside_RA)
    else:
        line_R = (item * TILES + tile) * GROUP + heads_R
        tl.store(acc_ptr + line_R[:, None] * RANK + a_A[None, :], acc_RA, mask=inside_RA)
        tl.store(sums_ptr + line_R * 2, m_R * factor, mask=heads_R < GROUP)
        tl.store(sums_ptr + line_R * 2 + 1, l_R, mask=heads_R < GROUP)


@triton.jit
def _join(
    acc_ptr,
    sums_ptr,
    lines_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program joins some numbers of one head of one row; rows of one part are complete without it."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    a_A = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    first, parts = tl.load(lines_ptr + row * 2), tl.load(lines_ptr + row * 2 + 1)
    if parts <= 1:
        return
    line_P = (first + tl.arange(0, MAX_PARTS)) * HEADS + head
    there_P = tl.arange(0, MAX_PARTS) < parts
    # The first parts load while the maxima do.
    j_J = tl.arange(0, AT_ONCE)
    line_J = (first + j_J) * HEADS + head
    there_JA = (j_J < parts)[:, None] & (a_A < RANK)[None, :]
    part_JA = tl.load(acc_ptr + line_J[:, None] * RANK + a_A[None, :], mask=there_JA, other=0.0)
    m_J = tl.load(sums_ptr + line_J * 2, mask=j_J < parts, other=float("-inf"))
    m_P = tl.load(sums_ptr + line_P * 2, mask=there_P, other=float("-inf"))
    l_P = tl.load(sums_ptr + line_P * 2 + 1, mask=there_P, other=0.0)
    m = tl.max(m_P, 0)
    total = tl.sum(l_P * tl.exp2(m_P - m), 0)
    acc_JA = part_JA * tl.exp2(m_J - m)[:, None]
    for part in range(AT_ONCE, parts, AT_ONCE):
        part_J = part + j_J
        line_J = (first + part_J) * HEADS + head
        m_J = tl.load(sums_ptr + line_J * 2, mask=part_J < parts, other=float("-inf"))
        there_JA = (part_J < parts)[:, None] & (a_A < RANK)[None, :]
        part_JA = tl.load(acc_ptr + line_J[:, None] * RANK + a_A[None, :], mask=there_JA, other=0.0)
        acc_JA += part_JA * tl.exp2(m_J - m)[:, None]
    tl.store(out_ptr + (row.to(tl.int64) * HEADS + head) * RANK + a_A, tl.sum(acc_JA, 0) / total, mask=a_A < RANK)


@triton.jit
def _turned(pair_ptr, cos_ptr, sin_ptr, there_B, ROTARY: tl.constexpr, B: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return rotated numbers (B) in the type of `pair_ptr`, each product rounded to it; see latent.LatentTurn."""
    half: tl.constexpr = ROTARY // 2
    b_B = tl.arange(0, B)
    first_B = b_B < half
    pair_B = tl.where(first_B, b_B, b_B - half)
    if INTERLEAVED:
        x_B = tl.load(pair_ptr + 2 * pair_B, mask=there_B, other=0.0).to(tl.float32)
        y_B = tl.load(pair_ptr + 2 * pair_B + 1, mask=there_B, other=0.0).to(tl.float32)
    else:
        x_B = tl.load(pair_ptr + pair_B, mask=there_B, other=0.0).to(tl.float32)
        y_B = tl.load(pair_ptr + half + pair_B, mask=there_B, other=0.0).to(tl.float32)
    cos_B = tl.load(cos_ptr + pair_B, mask=there_B, other=0.0).to(tl.float32)
    sin_B = tl.load(sin_ptr + pair_B, mask=there_B, other=0.0).to(tl.float32)
    own_B = (tl.where(first_B, x_B, y_B) * cos_B).to(pair_ptr.dtype.element_ty).to(tl.float32)
    cross_B = (tl.where(first_B, -y_B, x_B) * sin_B).to(pair_ptr.dtype.element_ty).to(tl.float32)
    return (own_B + cross_B).to(pair_ptr.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "position_ptr"])
def _absorb(
    q_ptr,
    up_ptr,
    out_ptr,
    own_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    position_ptr,
    q_head,
    up_head,
    eps,
    beta,
    span,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes some numbers of the latent query of a single row's head; the first adds rotary ones.

    With `own_ptr`, numbers are not rotated yet, and one more program normalizes and stores the step's latent.
    """
    if EARLY:
        gdc_launch_dependents()
    head, part = tl.program_id(0), tl.program_id(1)
    n_N = tl.arange(0, N)
    a_A = part * A + tl.arange(0, A)
    b_B = tl.arange(0, B)
    if head < HEADS:
        inside_NA = (n_N < PLAIN)[:, None] & (a_A < RANK)[None, :]
        up_NA = tl.load(up_ptr + head * up_head + n_N[:, None] * RANK + a_A[None, :], mask=inside_NA, other=0.0)
        if EARLY:
            gdc_wait()
        q_N = tl.load(q_ptr + head * q_head + n_N, mask=n_N < PLAIN, other=0.0).to(tl.float32)
        if position_ptr is not None:
            spans = tl.floor(tl.load(position_ptr).to(tl.float32) / span)
            growth = (1.0 + beta * tl.log(1.0 + spans)).to(q_ptr.dtype.element_ty).to(tl.float32)
            q_N = (q_N * growth).to(q_ptr.dtype.element_ty).to(tl.float32)
        made_A = tl.sum(up_NA.to(tl.float32) * q_N[:, None], 0)
        line_ptr = out_ptr + head * (RANK + ROTARY)
        tl.store(line_ptr + a_A, made_A.to(out_ptr.dtype.element_ty), mask=a_A < RANK)
        rotary_B = (b_B < ROTARY) & (part == 0)
        pair_ptr = q_ptr + head * q_head + PLAIN
        if own_ptr is not None:
            turned_B = _turned(pair_ptr, cos_ptr, sin_ptr, rotary_B, ROTARY, B, INTERLEAVED)
        else:
            turned_B = tl.load(pair_ptr + b_B, mask=rotary_B)
        if position_ptr is not None:
            turned_B = (turned_B.to(tl.float32) * growth).to(q_ptr.dtype.element_ty)
        tl.store(line_ptr + RANK + b_B, turned_B, mask=rotary_B)
    elif own_ptr is not None:
        w_W = tl.arange(0, WIDTH)
        inside_W = (w_W < RANK) & (part == 0)
        weight_W = tl.load(weight_ptr + w_W, mask=inside_W, other=0.0).to(tl.float32)
        if EARLY:
            gdc_wait()
        x_W = tl.load(own_ptr + w_W, mask=inside_W, other=0.0).to(tl.float32)
        x_W *= tl.rsqrt(tl.sum(x_W * x_W, 0) / RANK + eps)
        x_W = x_W.to(own_ptr.dtype.element_ty).to(tl.float32) * weight_W
        made_W = x_W.to(own_ptr.dtype.element_ty).to(cache_ptr.dtype.element_ty)
        slot = tl.load(slots_ptr).to(tl.int64)
        # As in `_decode`. The others of this program's parts have nothing to do.
        stored = (slot >= BLOCK_SIZE) & (part == 0)
        line_ptr = cache_ptr + slot * (RANK + ROTARY)
        tl.store(line_ptr + w_W, made_W, mask=inside_W & stored)
        rotary_B = (b_B < ROTARY) & stored
        turned_B = _turned(own_ptr + RANK, cos_ptr, sin_ptr, rotary_B, ROTARY, B, INTERLEAVED)
        tl.store(line_ptr + RANK + b_B, turned_B.to(cache_ptr.dtype.element_ty), mask=rotary_B)


@triton.jit
def _raise(
    seen_ptr,
    up_ptr,
    out_ptr,
    up_head,
    PLAIN: tl.constexpr,
    VALUES: tl.constexpr,
    RANK: tl.constexpr,
    V: tl.constexpr,
    A: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes V numbers of a single row's head from its weighted latent."""
    if EARLY:
        gdc_launch_dependents()
    head = tl.program_id(0)
    v_V = tl.program_id(1) * V + tl.arange(0, V)
    a_A = tl.arange(0, A)
    inside_VA = (v_V < VALUES)[:, None] & (a_A < RANK)[None, :]
    up_VA = tl.load(up_ptr + head * up_head + (PLAIN + v_V)[:, None] * RANK + a_A[None, :], mask=inside_VA, other=0.0)
    if EARLY:
        gdc_wait()
    seen_A = tl.load(seen_ptr + head * RANK + a_A, mask=a_A < RANK, other=0.0).to(tl.float32)
    made_V = tl.sum(up_VA.to(tl.float32) * seen_A[None, :], 1)
    tl.store(out_ptr + head * VALUES + v_V, made_V.to(out_ptr.dtype.element_ty), mask=v_V < VALUES)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["tables_ptr"])
def _prefill(
    q_ptr,
    cache_ptr,
    out_ptr,
    tiles_ptr,
    tables_ptr,
    scale,
    q_token,
    q_head,
    table_row,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr,
):
    """One program computes one tile of rows, each a query and a head; the step's latents are already in the cache."""
    tile = tl.program_id(0)
    sequence = tl.load(tiles_ptr + tile * 8 + 0)
    first_row = tl.load(tiles_ptr + tile * 8 + 1)
    token = tl.load(tiles_ptr + tile * 8 + 2)
    count = tl.load(tiles_ptr + tile * 8 + 3)
    start = tl.load(tiles_ptr + tile * 8 + 4)
    row_R = first_row + tl.arange(0, ROWS)
    query_R = row_R // HEADS
    head_R = row_R % HEADS
    a_A = tl.arange(0, WIDTH)
    b_B = tl.arange(0, ROTARY_WIDTH)
    there_R1 = (query_R < count)[:, None]
    token_R = (token + query_R).to(tl.int64)
    q_R1 = q_ptr + (token_R * q_token + head_R * q_head)[:, None]
    q_RA = tl.load(q_R1 + a_A[None, :], mask=there_R1 & (a_A < RANK)[None, :], other=0.0)
    q_RB = tl.load(q_R1 + RANK + b_B[None, :], mask=there_R1 & (b_B < ROTARY)[None, :], other=0.0)
    q_RA = q_RA.to(cache_ptr.dtype.element_ty)
    q_RB = q_RB.to(cache_ptr.dtype.element_ty)
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([ROWS], tl.float32)
    acc_RA = tl.zeros([ROWS, WIDTH], tl.float32)
    factor = unit(scale, False)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_row
    # Every row sees the first position, rows that pad the last tile too. A tile of no sequence has no positions.
    stop = tl.where(count > 0, start + tl.minimum((first_row + ROWS - 1) // HEADS + 1, count), 0)
    block_N = blocks_of(table_ptr, 0, stop, BLOCK_SIZE, TILE)
    for position in range(0, stop, TILE):
        next_N = blocks_of(table_ptr, position + TILE, stop, BLOCK_SIZE, TILE)
        latent_NA, rotary_NB = _rows(
            cache_ptr, block_N, position, stop, RANK, ROTARY, BLOCK_SIZE, TILE, WIDTH, ROTARY_WIDTH
        )
        block_N = next_N
        s_RN = products(q_RA, latent_NA) + products(q_RB, rotary_NB)
        position_N = position + tl.arange(0, TILE)
        seen_RN = (position_N[None, :] <= start + query_R[:, None]) & (position_N < stop)[None, :]
        s_RN = tl.where(seen_RN, s_RN, float("-inf"))
        m_R, l_R, acc_RA = accumulate(s_RN, latent_NA, m_R, l_R, acc_RA, factor, False)
    out_RA = out_ptr + ((token_R * HEADS + head_R) * RANK)[:, None] + a_A[None, :]
    tl.store(out_RA, acc_RA / l_R[:, None], mask=there_R1 & (a_A < RANK)[None, :])


def tiles_of(heads: int, rows: int) -> int:
    """Return into how many tiles heads are cut for decoding so many rows: equal ones, of at most 32.

    A single row leaves most multiprocessors idle, and a tile of 16 heads takes a third of the instructions of one of 32
    and half the registers; of more heads, too many tiles would read the same latents.
    """
    most = _MOST_HEADS // 2 if rows == 1 and heads <= _MOST_HEADS else _MOST_HEADS
    found = next(tiles for tiles in range(1, heads + 1) if heads % tiles == 0 and heads // tiles <= most)
    # 25 heads, or a prime number of them, would be cut into too many tiles.
    return 1 if heads <= _MOST_HEADS and found > 2 else found


def decode(
    q_THW: Tensor,
    latent_TW: Tensor | None,
    kv: LayerLatent,
    group: GroupMetadata,
    plan: DecodePlan,
    scale: float,
    *,
    early: bool,
) -> Tensor:
    """Store and attend for the first rows of the step, one token each; returns weighted latents (B, H, R).

    Args:
        latent_TW: None if the step's latents are stored already.
        plan: for as many key-value heads as there are tiles of heads, joined apart, of at most `MAX_PARTS` parts.
        early: start before the previous kernel ends; only if the hardware can.
    """
    heads, tiles = q_THW.shape[1], plan.arrived_BK.shape[1]
    block_size, width = kv.latents.shape[1:]
    rank, rotary = kv.rank, width - kv.rank
    out_BHR = q_THW.new_empty((plan.arrived_BK.shape[0], heads, rank))
    tile, warps, stages = shape_of(len(out_BHR), kv.latents.element_size())
    assert plan.lines_B2 is not None
    workspace = workspace_of(plan, heads, rank, q_THW.device)
    _decode[(tiles, plan.items_W8.shape[0])](
        q_THW,
        latent_TW,
        kv.latents,
        out_BHR,
        plan.items_W8,
        group.slots_T,
        group.tables_BN,
        *workspace,
        scale,
        *q_THW.stride()[:2],
        0 if latent_TW is None else latent_TW.stride(0),
        group.tables_BN.stride(0),
        tiles,
        heads // tiles,
        rank,
        rotary,
        block_size,
        max(16, triton.next_power_of_2(heads // tiles)),
        tile,
        max(16, triton.next_power_of_2(rank)),
        max(16, triton.next_power_of_2(rotary)),
        early,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=True,
        **_options(early),
    )
    _join[(len(out_BHR), heads, triton.cdiv(rank, _JOINED_NUMBERS))](
        *workspace, plan.lines_B2, out_BHR, heads, rank, _JOINED_NUMBERS, MAX_PARTS, _JOINED_AT_ONCE, early,
        num_warps=4, enable_fp_fusion=True, **_options(early),
    )  # fmt: skip
    return out_BHR


def shape_of(rows: int, element_bytes: int) -> tuple[int, int, int]:
    """Return positions per tile, warps and pipeline stages of `decode` for so many rows.

    Of a single row, tiles of 64 positions and one program a multiprocessor take 8.2 microseconds after 512 positions
    and 24.5 after 16,384, with 20 heads on an H200; tiles of 32 and two programs 7.2 and 35.
    """
    if rows == 1:
        return (32 if element_bytes == 4 else 64), 8, 2
    return (16 if element_bytes == 4 else 32), 4, 3


def programs_of(rows: int, multiprocessors: int) -> int:
    """Return how many programs are planned for decoding so many rows; see shape_of."""
    return multiprocessors if rows == 1 else _PROGRAMS_PER_SM * multiprocessors


def absorb_row(q_HC: Tensor, up_HDR: Tensor, rotary: int, *, early: bool) -> Tensor:
    """Return a single row's queries of latents, (1, H, W); `latent.absorbed` for many.

    Args:
        q_HC: with a head's numbers side by side.
        up_HDR: contiguous.
        early: see `decode`.
    """
    return _absorbed(q_HC, up_HDR, rotary, None, None, early=early)


def store_and_absorb_row(
    q_HC: Tensor, latent_W: Tensor, turn: LatentTurn, up_HDR: Tensor, kv: LayerLatent, slots_T: Tensor, *, early: bool
) -> Tensor:
    """Store a single row's latent, and return its queries of latents, (1, H, W), both turned; see `absorb_row`."""
    assert latent_W.is_contiguous()
    assert all(each.is_contiguous() for each in (turn.weight_R, turn.cos_P, turn.sin_P))
    assert kv.latents.shape[2] == latent_W.numel() == up_HDR.shape[2] + turn.cos_P.numel()
    return _absorbed(q_HC, up_HDR, turn.cos_P.numel(), (latent_W, turn), (kv.latents, slots_T), early=early)


def _absorbed(
    q_HC: Tensor,
    up_HDR: Tensor,
    rotary: int,
    own: tuple[Tensor, LatentTurn] | None,
    cache: tuple[Tensor, Tensor] | None,
    *,
    early: bool,
) -> Tensor:
    assert q_HC.stride(1) == 1
    assert up_HDR.is_contiguous()
    heads, both, rank = up_HDR.shape
    plain = q_HC.shape[1] - rotary
    q_1HW = q_HC.new_empty((1, heads, rank + rotary))
    turning: tuple[Tensor | None, ...] = (None,) * 4
    eps, interleaved = 0.0, False
    position_1, beta, span = None, 0.0, 1.0
    if own is not None:
        latent_W, turn = own
        turning = latent_W, turn.weight_R, turn.cos_P, turn.sin_P
        eps, interleaved = turn.eps, turn.interleaved
        if turn.growth is not None:
            position_1, beta, span = turn.growth
    latents, slots_T = cache or (None, None)
    block_size = 0 if latents is None else latents.shape[1]
    sizes = heads, plain, rank, rotary, block_size, triton.next_power_of_2(plain), _ABSORBED
    lanes = triton.next_power_of_2(rotary), triton.next_power_of_2(rank)
    _absorb[(heads + (own is not None), triton.cdiv(rank, _ABSORBED))](
        q_HC, up_HDR, q_1HW, *turning, latents, slots_T, position_1, q_HC.stride(0), both * rank, eps, beta, span,
        *sizes, *lanes, interleaved, early, num_warps=4, enable_fp_fusion=True, **_options(early),
    )  # fmt: skip
    return q_1HW


def raise_row(seen_1HR: Tensor, up_HDR: Tensor, plain: int, out_HV: Tensor, *, early: bool) -> None:
    """Write a single row's outputs (H, V) of its weighted latents; `latent.raised` for many; all contiguous.

    Args:
        early: see `decode`.
    """
    assert all(each.is_contiguous() for each in (seen_1HR, up_HDR, out_HV))
    heads, both, rank = up_HDR.shape
    sizes = plain, both - plain, rank, _RAISED, triton.next_power_of_2(rank)
    _raise[(heads, triton.cdiv(both - plain, _RAISED))](
        seen_1HR, up_HDR, out_HV, both * rank, *sizes, early,
        num_warps=4, enable_fp_fusion=True, **_options(early),
    )  # fmt: skip


def _options(early: bool) -> dict[str, int]:
    """Return the launch options for an early start; empty where Triton does not support it."""
    return {"launch_pdl": True} if early else {}


def rows_of(element_bytes: int, shared_bytes: int) -> int:
    """Return the rows of a tile of `prefill`; queries and two stages of latents must fit the shared memory."""
    return 16 if element_bytes == 4 else 64 if shared_bytes >= 160_000 else 16


def prefill(
    q_THW: Tensor, kv: LayerLatent, group: GroupMetadata, tiles_L8: Tensor, rows: int, out_THR: Tensor, scale: float
) -> None:
    """Attend for prefilling sequences, whose latents are stored; writes their rows of `out_THR`.

    Args:
        tiles_L8: see triton_prefill.make_tiles, for H heads to a key-value head and `rows` rows.
    """
    heads = q_THW.shape[1]
    block_size, width = kv.latents.shape[1:]
    rank, rotary = kv.rank, width - kv.rank
    _prefill[(tiles_L8.shape[0],)](
        q_THW,
        kv.latents,
        out_THR,
        tiles_L8,
        group.tables_BN,
        scale,
        *q_THW.stride()[:2],
        group.tables_BN.stride(0),
        heads,
        rank,
        rotary,
        block_size,
        rows,
        16 if kv.latents.element_size() == 4 else 32,
        max(16, triton.next_power_of_2(rank)),
        max(16, triton.next_power_of_2(rotary)),
        num_warps=8 if rows > 16 else 4,
        num_stages=2,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _store(new_ptr, cache_ptr, slots_ptr, new_token, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """One program moves one row; padding has slots of the null block, which stays unchanged."""
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cells = tl.arange(0, WIDTH)
    if slot >= BLOCK_SIZE:
        new = tl.load(new_ptr + token.to(tl.int64) * new_token + cells, mask=cells < SIZE)
        tl.store(cache_ptr + slot * SIZE + cells, new.to(cache_ptr.dtype.element_ty), mask=cells < SIZE)


def store(latent_TW: Tensor, kv: LayerLatent, slots_T: Tensor) -> None:
    """Write token t's latent and rotary key to slot `slots_T[t]`; tokens with slots of the null block are skipped."""
    block_size, width = kv.latents.shape[1:]
    _store[(latent_TW.shape[0],)](
        latent_TW,
        kv.latents,
        slots_T,
        latent_TW.stride(0),
        width,
        block_size,
        triton.next_power_of_2(width),
        num_warps=4,
        enable_fp_fusion=True,
    )


def nothing_cached(kv: LayerLatent, k_THC: Tensor, v_THV: Tensor) -> LayerKV:
    """Return an empty cache for expanded keys and values, of prompts without a prefix, which never read it."""
    block_size = kv.latents.shape[1]
    keys, values = (x.new_empty((0, block_size, *x.shape[1:]), dtype=kv.latents.dtype) for x in (k_THC, v_THV))
    return LayerKV(keys, values, kv.group)
