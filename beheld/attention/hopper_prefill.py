"""Prefill of long prompts on Hopper GPUs: copies, products and softmax in warps of their own.

Shapes: T tokens, K key-value heads, H query heads, G = H / K of them in a group, C head size, N keys of a tile,
R rows of a consumer, L tiles of rows.

A program computes one tile of 2 R rows, laid out as `triton_prefill` does, in three groups of four warps. The first,
the producer, copies tiles of keys and values to shared memory, as many ahead as there are stages. The two others,
consumers, take R rows each. The matrix units multiply while a consumer goes on: it starts the products of a tile's keys
and of the values of the tile before, and makes weights of the former while the latter run, as FlashAttention-3 does
(https://arxiv.org/abs/2407.08608).

    producer      | K0 V0 K1 V1 |  K2 once both have read K0 | V2 once both have read V0 | ..
    matrix units  |   K0   |   K1  V0   |   K2  V1   | ..
    a consumer    |        | weights 0  | weights 1  | weights 2 ..

Keys and values come from two places, the cache (through the block table) and the step's own tokens. Tiles that every
row sees come first, from either place, then those that need a mask: the prefix's last, and the edge of the causal
triangle.

Gluon is Triton's language for layouts, barriers and warps that the compiler would choose otherwise.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from beheld.attention.backend import GroupMetadata, LayerKV
from beheld.attention.definition import defined
from beheld.core.errors import first_line
from beheld.platform.registry import platform_of
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# A query of the step sees this many keys in the mean, or `triton_prefill` is as fast: one H200, 16 heads of 128 over 2,
# microseconds a layer here and there, with storing: 32 x 512 tokens 173 and 145, 16 x 1,024 223 and 221, 8,192 472 and
# 559, 16,384 1,816 and 2,282, 8,192 behind 32,768 3,922 and 6,573.
_MEAN_KEYS = 1024
# Steps of fewer tokens were not measured.
_FEWEST = 512
# Rows of both consumers, keys of a tile, tiles in shared memory, and keys that lie in one block of the cache.
_ROWS = gl.constexpr(128)
_KEYS = gl.constexpr(128)
_STAGES = gl.constexpr(2)
_PIECE = gl.constexpr(16)
# Registers of a consumer's thread; the producer's have what is left, 24.
_REGISTERS = gl.constexpr(240)
# Triton 3.7 renamed it.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Triton 3.8 renamed these: copies by the copy engine and by threads. 3.9 has the earlier names no more.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def _lines(size):
    """Return the layout in which four warps move lines of `size` elements, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // size, size // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def _products(columns):
    """Return the layout of a consumer's products with so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _item(tiles_ptr, KV_HEADS: gl.constexpr):
    """Return the program's head, and its tile's sequence, first row, first token, number of tokens and start.

    See `triton_prefill.make_tiles`.
    """
    line = tiles_ptr + gl.program_id(0) // KV_HEADS * 8
    sequence, first_row, token = gl.load(line), gl.load(line + 1), gl.load(line + 2)
    return gl.program_id(0) % KV_HEADS, sequence, first_row, token, gl.load(line + 3), gl.load(line + 4)


@gluon.jit
def _spans(first_row, count, start, GROUP: gl.constexpr):
    """Return numbers of tiles and keys, in the order of tiles.

    These are: whole tiles of the prefix; tiles that every row sees, those included; keys of the prefix's last tile;
    tiles that these make (0 or 1); all tiles.
    """
    cached = start // _KEYS
    rest = start % _KEYS
    partial = gl.where(rest > 0, 1, 0)
    plain = cached + (first_row // GROUP + 1) // _KEYS
    high = gl.minimum((first_row + _ROWS - 1) // GROUP + 1, count)
    return cached, plain, rest, partial, cached + partial + (high + _KEYS - 1) // _KEYS


@gluon.jit
def _blocks(table, position, BLOCK_SIZE: gl.constexpr):
    """Return the blocks of a tile's eight pieces from `position` on; all are asked for before one is waited for."""
    b0 = gl.load(table + position // BLOCK_SIZE)
    b1 = gl.load(table + (position + _PIECE) // BLOCK_SIZE)
    b2 = gl.load(table + (position + 2 * _PIECE) // BLOCK_SIZE)
    b3 = gl.load(table + (position + 3 * _PIECE) // BLOCK_SIZE)
    b4 = gl.load(table + (position + 4 * _PIECE) // BLOCK_SIZE)
    b5 = gl.load(table + (position + 5 * _PIECE) // BLOCK_SIZE)
    b6 = gl.load(table + (position + 6 * _PIECE) // BLOCK_SIZE)
    b7 = gl.load(table + (position + 7 * _PIECE) // BLOCK_SIZE)
    return b0, b1, b2, b3, b4, b5, b6, b7


@gluon.jit
def _fetch_pieces(tile, pieces, blocks, position, column, ready, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Let the copy engine fetch a whole tile of the cache (N, C)."""
    mbarrier.expect(ready, _KEYS * SIZE * 2)
    for piece in gl.static_range(_KEYS // _PIECE):
        line = blocks[piece] * BLOCK_SIZE + (position + piece * _PIECE) % BLOCK_SIZE
        _fetch(pieces, [line, column], ready, tile.slice(piece * _PIECE, _PIECE, 0))


@gluon.jit
def _fetch_tile(tile, tiles, row, column, ready, SIZE: gl.constexpr):
    """Let the copy engine fetch a whole tile of the step's tokens (N, C)."""
    mbarrier.expect(ready, _KEYS * SIZE * 2)
    _fetch(tiles, [row, column], ready, tile)


@gluon.jit
def _copy_cached(tile, base, table, start, head, KV_HEADS: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Let threads copy the prefix's last tile (N, C); zeros from `start` on."""
    r_R = gl.arange(0, _PIECE, layout=gl.SliceLayout(1, _lines(SIZE)))
    c_C = gl.arange(0, SIZE, layout=gl.SliceLayout(0, _lines(SIZE)))
    for piece in gl.static_range(_KEYS // _PIECE):
        place = start // _KEYS * _KEYS + piece * _PIECE
        block = gl.load(table + place // BLOCK_SIZE, mask=place < start, other=0)
        line = (block.to(gl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * KV_HEADS + head
        from_RC = base + line * SIZE + (r_R * (KV_HEADS * SIZE))[:, None] + c_C[None, :]
        live_RC = (place + r_R < start)[:, None] & (c_C >= 0)[None, :]
        _copy(tile.slice(piece * _PIECE, _PIECE, 0), from_RC, mask=live_RC)
    async_copy.commit_group()


@gluon.jit
def _copy_own(tile, base, stride, own, count, SIZE: gl.constexpr):
    """Let threads copy a sequence's last tile (N, C), from its token `own` of this step on; zeros from `count` on.

    What follows a sequence's tokens is another's: a NaN of it times a weight of zero is still NaN.
    """
    r_R = gl.arange(0, _PIECE, layout=gl.SliceLayout(1, _lines(SIZE)))
    c_C = gl.arange(0, SIZE, layout=gl.SliceLayout(0, _lines(SIZE)))
    for piece in gl.static_range(_KEYS // _PIECE):
        place_R = own + piece * _PIECE + r_R
        from_RC = base + (place_R.to(gl.int64) * stride)[:, None] + c_C[None, :]
        live_RC = (place_R < count)[:, None] & (c_C >= 0)[None, :]
        _copy(tile.slice(piece * _PIECE, _PIECE, 0), from_RC, mask=live_RC)
    async_copy.commit_group()


@gluon.jit
def _publish(ready, PENDING: gl.constexpr):
    """Tell consumers of a tile that threads copied; `PENDING` later ones may still be on their way."""
    async_copy.wait_group(PENDING)
    hopper.fence_async_shared()
    _barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _produce(
    keys,
    values,
    tiles_ptr,
    tables_ptr,
    table_row,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Copy all tiles of keys and values, in the order in which consumers read them.

    Args:
        keys: shared memory, barriers (ready, free), the step's tokens (first head, stride of a token and of a head,
            tiles, rows and columns of them between two heads) and the cache (first line, pieces) of keys; `values`
            likewise.
    """
    k_stages, k_ready, k_free, k_ptr, k_token, k_head, k_tiles, k_row, k_column, keys_ptr, k_pieces = keys
    v_stages, v_ready, v_free, v_ptr, v_token, v_head, v_tiles, v_row, v_column, values_ptr, v_pieces = values
    head, sequence, first_row, token, count, start = _item(tiles_ptr, KV_HEADS)
    cached, plain, rest, partial, tiles = _spans(first_row, count, start, GROUP)
    table = tables_ptr + sequence.to(gl.int64) * table_row
    column = head * SIZE
    for number in range(tiles):
        stage = number % _STAGES
        # A fresh barrier's previous phase counts as complete.
        phase = (number // _STAGES + 1) & 1
        k_tile, v_tile = k_stages.index(stage), v_stages.index(stage)
        own = gl.where(number < plain, number - cached, number - cached - partial) * _KEYS
        if number < cached:
            position = number * _KEYS
            blocks = _blocks(table, position, BLOCK_SIZE)
            mbarrier.wait(k_free.index(stage), phase)
            _fetch_pieces(k_tile, k_pieces, blocks, position, column, k_ready.index(stage), SIZE, BLOCK_SIZE)
            mbarrier.wait(v_free.index(stage), phase)
            _fetch_pieces(v_tile, v_pieces, blocks, position, column, v_ready.index(stage), SIZE, BLOCK_SIZE)
        elif (number == plain) & (rest > 0):
            mbarrier.wait(k_free.index(stage), phase)
            _copy_cached(k_tile, keys_ptr, table, start, head, KV_HEADS, SIZE, BLOCK_SIZE)
            mbarrier.wait(v_free.index(stage), phase)
            _copy_cached(v_tile, values_ptr, table, start, head, KV_HEADS, SIZE, BLOCK_SIZE)
            _publish(k_ready.index(stage), 1)
            _publish(v_ready.index(stage), 0)
        elif own + _KEYS <= count:
            mbarrier.wait(k_free.index(stage), phase)
            _fetch_tile(k_tile, k_tiles, token + own + head * k_row, head * k_column, k_ready.index(stage), SIZE)
            mbarrier.wait(v_free.index(stage), phase)
            _fetch_tile(v_tile, v_tiles, token + own + head * v_row, head * v_column, v_ready.index(stage), SIZE)
        else:
            mbarrier.wait(k_free.index(stage), phase)
            _copy_own(
                k_tile, k_ptr + token.to(gl.int64) * k_token + head.to(gl.int64) * k_head, k_token, own, count, SIZE
            )
            mbarrier.wait(v_free.index(stage), phase)
            _copy_own(
                v_tile, v_ptr + token.to(gl.int64) * v_token + head.to(gl.int64) * v_head, v_token, own, count, SIZE
            )
            _publish(k_ready.index(stage), 1)
            _publish(v_ready.index(stage), 0)


@gluon.jit
def _start_keys(q_rows, keys, number):
    """Start the products of queries and a tile's keys (R, N)."""
    k_stages, k_ready, _ = keys
    stage = number % _STAGES
    mbarrier.wait(k_ready.index(stage), (number // _STAGES) & 1)
    s_RN = gl.zeros([_ROWS // 2, _KEYS], gl.float32, _products(_KEYS))
    return hopper.warpgroup_mma(q_rows, k_stages.index(stage).permute((1, 0)), s_RN, use_acc=False, is_async=True)


@gluon.jit
def _start_values(p_RN, values, number, acc_RC):
    """Start the products of weights and a tile's values, on top of `acc_RC`."""
    v_stages, v_ready, _ = values
    stage = number % _STAGES
    mbarrier.wait(v_ready.index(stage), (number // _STAGES) & 1)
    return hopper.warpgroup_mma(p_RN, v_stages.index(stage), acc_RC, is_async=True)


@gluon.jit
def _weigh(s_RN, bound_R, m_R, l_R, factor, MASKED: gl.constexpr):
    """Return weights (R, N), maxima, sums, and what older weights are to be multiplied by.

    A masked row sees the first `bound_R` keys; every row has seen one key after its first tile.
    """
    if MASKED:
        n_N = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, _products(_KEYS)))
        s_RN = gl.where(n_N[None, :] < bound_R[:, None], s_RN, float("-inf"))
    top_R = gl.maximum(m_R, gl.max(s_RN, 1) * factor)
    p_RN = gl.exp2(s_RN * factor - top_R[:, None])
    shrink_R = gl.exp2(m_R - top_R)
    return p_RN, top_R, l_R * shrink_R + gl.sum(p_RN, 1), shrink_R


@gluon.jit
def _take(
    q_rows, keys, values, number, bound_R, m_R, l_R, p_RN, acc_RC, factor, MASKED: gl.constexpr, SIZE: gl.constexpr
):
    """Make a tile's weights, while the values of the tile before are added by its weights `p_RN`."""
    s_RN = _start_keys(q_rows, keys, number)
    acc_RC = _start_values(p_RN, values, number - 1, acc_RC)
    s_RN = hopper.warpgroup_mma_wait(num_outstanding=1, deps=(s_RN,))
    mbarrier.arrive(keys[2].index(number % _STAGES), count=1)
    next_RN, m_R, l_R, shrink_R = _weigh(s_RN, bound_R, m_R, l_R, factor, MASKED)
    acc_RC = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(acc_RC,))
    mbarrier.arrive(values[2].index((number - 1) % _STAGES), count=1)
    acc_RC = acc_RC * gl.convert_layout(shrink_R, gl.SliceLayout(1, _products(SIZE)))[:, None]
    return m_R, l_R, _as_weights(next_RN, q_rows.dtype, SIZE), acc_RC


@gluon.jit
def _as_weights(p_RN, dtype: gl.constexpr, SIZE: gl.constexpr):
    """Return weights as the left side of a product with values of `SIZE` columns, in registers."""
    return gl.convert_layout(p_RN.to(dtype), gl.DotOperandLayout(0, _products(SIZE), 2))


@gluon.jit
def _consume(
    keys,
    values,
    q_smem,
    rows,
    factor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    WHICH: gl.constexpr,
):
    """Compute one half of the tile's rows.

    Args:
        keys: shared memory and barriers (ready, free) of keys; `values` likewise.
        rows: queries, strides of a token and of a head, output, and tiles.
    """
    q_ptr, q_token, q_head, out_ptr, tiles_ptr = rows
    HALF: gl.constexpr = _ROWS // 2
    head, _sequence, first_row, token, count, start = _item(tiles_ptr, KV_HEADS)
    cached, plain, rest, partial, tiles = _spans(first_row, count, start, GROUP)
    row = first_row + WHICH * HALF

    r_R = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, _lines(SIZE)))
    c_C = gl.arange(0, SIZE, layout=gl.SliceLayout(0, _lines(SIZE)))
    there_RC = (r_R // GROUP < count)[:, None] & (c_C >= 0)[None, :]
    token_R = (token + r_R // GROUP).to(gl.int64)
    head_R = (head * GROUP + r_R % GROUP).to(gl.int64)
    from_RC = q_ptr + (token_R * q_token + head_R * q_head)[:, None] + c_C[None, :]
    q_rows = q_smem.index(WHICH)
    q_rows.store(gl.load(from_RC, mask=there_RC, other=0.0))
    hopper.fence_async_shared()
    _barrier()

    row_R = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, _products(_KEYS)))
    sees_R = gl.minimum(row_R // GROUP + 1, count)
    m_R = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, _products(_KEYS)))
    l_R = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, _products(_KEYS)))
    acc_RC = gl.zeros([HALF, SIZE], gl.float32, _products(SIZE))
    s_RN = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(_start_keys(q_rows, keys, 0),))
    mbarrier.arrive(keys[2].index(0), count=1)
    bound_R = gl.where(plain > 0, _KEYS, gl.where(rest > 0, rest, sees_R))
    p_RN, m_R, l_R, _ = _weigh(s_RN, bound_R, m_R, l_R, factor, True)
    p_RN = _as_weights(p_RN, q_rows.dtype, SIZE)
    for number in range(1, plain):
        m_R, l_R, p_RN, acc_RC = _take(
            q_rows, keys, values, number, sees_R, m_R, l_R, p_RN, acc_RC, factor, False, SIZE
        )
    for number in range(gl.maximum(plain, 1), tiles):
        own_R = sees_R - (number - cached - partial) * _KEYS
        bound_R = gl.where((number == plain) & (rest > 0), rest, own_R)
        m_R, l_R, p_RN, acc_RC = _take(
            q_rows, keys, values, number, bound_R, m_R, l_R, p_RN, acc_RC, factor, True, SIZE
        )
    acc_RC = _start_values(p_RN, values, tiles - 1, acc_RC)
    acc_RC = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(acc_RC,))
    acc_RC = acc_RC / gl.convert_layout(l_R, gl.SliceLayout(1, _products(SIZE)))[:, None]
    to_RC = out_ptr + ((token_R * (KV_HEADS * GROUP) + head_R) * SIZE)[:, None] + c_C[None, :]
    gl.store(to_RC, gl.convert_layout(acc_RC.to(q_rows.dtype), _lines(SIZE)), mask=there_RC)


@gluon.jit(do_not_specialize=["k_row", "v_row", "table_row"], do_not_specialize_on_alignment=["tables_ptr"])
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
    k_pieces,
    v_pieces,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    k_row,
    k_column,
    v_row,
    v_column,
    table_row,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """One program computes one tile of rows and one key-value head."""
    dtype: gl.constexpr = k_tiles.dtype
    layout: gl.constexpr = k_tiles.layout
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    k_stages = gl.allocate_shared_memory(dtype, [_STAGES, _KEYS, SIZE], layout)
    v_stages = gl.allocate_shared_memory(dtype, [_STAGES, _KEYS, SIZE], layout)
    q_smem = gl.allocate_shared_memory(dtype, [2, _ROWS // 2, SIZE], layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barriers)
    k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barriers)
    v_ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barriers)
    v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], barriers)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        # Both consumers.
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    k_from = (k_stages, k_ready, k_free, k_ptr, k_token, k_head, k_tiles, k_row, k_column, keys_ptr, k_pieces)
    v_from = (v_stages, v_ready, v_free, v_ptr, v_token, v_head, v_tiles, v_row, v_column, values_ptr, v_pieces)
    keys, values = (k_stages, k_ready, k_free), (v_stages, v_ready, v_free)
    rows = q_ptr, q_token, q_head, out_ptr, tiles_ptr
    # Weights are powers of two, which take one instruction.
    factor = scale * 1.4426950408889634
    gl.warp_specialize(
        [
            (_produce, (k_from, v_from, tiles_ptr, tables_ptr, table_row, KV_HEADS, GROUP, SIZE, BLOCK_SIZE)),
            (_consume, (keys, values, q_smem, rows, factor, KV_HEADS, GROUP, SIZE, 0)),
            (_consume, (keys, values, q_smem, rows, factor, KV_HEADS, GROUP, SIZE, 1)),
        ],
        [4, 4],
        [_REGISTERS, _REGISTERS],
    )


def is_long(pieces: Iterable[tuple[int, int]]) -> bool:
    """Return whether pieces of prompts, (start, stop) each, see so many keys that this kernel is the faster one."""
    pairs = tokens = 0
    for start, stop in pieces:
        tokens += stop - start
        pairs += (stop - start) * (stop + start + 1) // 2
    return tokens >= _FEWEST and pairs >= _MEAN_KEYS * tokens


def takes(q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV) -> bool:
    """Return whether the kernel computes such a layer, without a window, soft cap or sinks. Not within a graph."""
    block_size, kv_heads, size = kv.keys.shape[1:]
    fits = kv.keys.dtype == kv.values.dtype == q_THC.dtype and q_THC.element_size() == 2
    fits = fits and size in (64, 128) and v_TKC.shape[2] == size and block_size % _PIECE.value == 0
    # The copy engine needs addresses and strides in multiples of 16 bytes.
    for x_TKC in (k_TKC, v_TKC):
        fits = fits and _between_heads(x_TKC) is not None
        fits = fits and x_TKC.stride(0) % 8 == 0 and x_TKC.stride(1) % 8 == 0 and x_TKC.data_ptr() % 16 == 0
    return fits and _works(q_THC.device, q_THC.dtype, kv_heads, q_THC.shape[1] // kv_heads, size, block_size)


@functools.cache
@torch.inference_mode()
def _works(
    device: torch.device, dtype: torch.dtype, kv_heads: int, heads_per_kv: int, size: int, block_size: int
) -> bool:
    """Return whether the kernel can be compiled, and gives attention by its definition for a prompt with a prefix.

    Gluon, in which it is written, is a part of Triton that may change with any version.
    """
    start, length = 200, 500
    generator = torch.Generator(device).manual_seed(0)
    shape = length, kv_heads * (heads_per_kv + 2), size
    q, k, v = (
        torch.randn(shape, generator=generator, device=device)
        .to(dtype)
        .split((kv_heads * heads_per_kv, kv_heads, kv_heads), dim=1)
    )
    blocks = -(-length // block_size)
    keys, values = (torch.zeros(blocks, block_size, kv_heads, size, dtype=dtype, device=device) for _ in range(2))
    for cached, x in ((keys, k), (values, v)):
        cached.flatten(0, 1)[:start] = x[:start]
    tables = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    count = length - start
    firsts = range(0, count * heads_per_kv, rows_of_tile())
    tiles = torch.tensor([(0, row, 0, count, start, 0, 0, 0) for row in firsts], dtype=torch.int32, device=device)
    group = GroupMetadata(torch.arange(start, length, device=device), tables, None)
    out = torch.empty((count, kv_heads * heads_per_kv, size), dtype=dtype, device=device)
    try:
        prefill(q[start:], k[start:], v[start:], out, LayerKV(keys, values, 0), group, tiles, size**-0.5)
        platform_of(device).synchronize()
    except Exception as error:
        # Whatever a version of Triton lacks, the other kernel computes the same.
        logger.warning("Long prompts take longer: this Triton does not compile their kernel: %s", first_line(error))
        return False
    seen = torch.arange(length, device=device) <= torch.arange(start, length, device=device)[:, None]
    want = defined(q[start:], k, v, seen, size**-0.5)
    if not (out - want).norm() < 0.02 * want.norm():
        logger.warning("Long prompts take longer: their kernel gives wrong results on this device.")
        return False
    return True


def prefill(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out_THC: Tensor,
    kv: LayerKV,
    group: GroupMetadata,
    tiles_L8: Tensor,
    scale: float,
) -> None:
    """Attend for all sequences of the tiles; writes their rows of `out_THC`. The prefix must be in the cache."""
    heads = q_THC.shape[1]
    block_size, kv_heads, size = kv.keys.shape[1:]
    (k_tiles, k_between), (v_tiles, v_between) = _of_step(k_TKC), _of_step(v_TKC)
    k_pieces, v_pieces = (_descriptor(x.flatten(0, 1).flatten(1), size, _PIECE.value) for x in (kv.keys, kv.values))
    arguments = q_THC, k_TKC, v_TKC, kv.keys, kv.values, out_THC, tiles_L8, group.tables_BN
    copied = k_tiles, v_tiles, k_pieces, v_pieces
    strides = (*q_THC.stride()[:2], *k_TKC.stride()[:2], *v_TKC.stride()[:2], *k_between, *v_between)
    sizes = kv_heads, heads // kv_heads, size, block_size
    _prefill[(tiles_L8.shape[0] * kv_heads,)](
        *arguments, *copied, scale, *strides, group.tables_BN.stride(0), *sizes, num_warps=4, enable_fp_fusion=True
    )


def rows_of_tile() -> int:
    """Return the rows of a tile that one program computes."""
    return int(_ROWS.value)


def _between_heads(x_TKC: Tensor) -> tuple[int, int] | None:
    """Return rows and columns between two heads, as the copy engine sees them: one is 0.

    Heads lie side by side in a token's line, or each has lines of its own; None if they lie otherwise.
    """
    _tokens, heads, size = x_TKC.shape
    token, head = x_TKC.stride()[:2]
    if heads == 1 or (head == size and token >= heads * size):
        return 0, size
    return (head // token, 0) if head % token == 0 else None


def _of_step(x_TKC: Tensor) -> tuple[TensorDescriptor, tuple[int, int]]:
    """Return the copy engine's descriptor of the step's keys or values, and `_between_heads`."""
    tokens, heads, size = x_TKC.shape
    between = _between_heads(x_TKC)
    assert between is not None, "`takes` was not asked"
    rows, columns = between
    shape = tokens + (heads - 1) * rows, size + (heads - 1) * columns
    return _descriptor(x_TKC.as_strided(shape, (x_TKC.stride(0), 1)), size, _KEYS.value), between


def _descriptor(x: Tensor, size: int, lines: int) -> TensorDescriptor:
    """Return the copy engine's descriptor of pieces of a matrix, each of so many lines and `size` columns."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [lines, size], gl.NVMMASharedLayout(128, 16, 2))
