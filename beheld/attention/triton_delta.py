"""The gated delta rule on the cache in Triton kernels: two launches for decoding, four for prompts.

Decoding and prompts begin with the short convolution and its SiLU. A prompt is cut into chunks of at most 64 tokens,
which end where a state is kept; see gated_delta.py for the formulas. The first of its other kernels solves the
triangular system of every chunk, all at once; the second goes through the chunks of each sequence in turn.

Nothing is read back to the host, and decoding reads every number that changes between steps from tensors on the device,
so that a CUDA graph may contain it. Rows that pad such a graph write nothing. Its two kernels start before the previous
one ends (models/one_row_kernel.py): they signal, read weights and what earlier steps left behind, wait, and compute.

Shapes: T tokens, D of them decoding, H heads of values, K and V sizes of a key and a value, C channels, L positions
that the convolution sees; of a kernel, N tokens of a chunk.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.attention.backend import AttnMetadata, GroupMetadata
from beheld.attention.gated_delta import EPSILON, GatedDelta, Gates
from beheld.attention.recurrent import LayerStates, StateSlice
from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.platform.registry import platform_of

_CHUNK = 64
# Blocks of a chunk's system whose side is the chunk's halved this often are solved row by row.
_DOUBLINGS = 2
# Columns of a state in a program: more where the programs are many. Measured on an H200: 8 prompts of 1,024 tokens take
# 214 microseconds with the one and 336 with the other, one of 8,192 tokens takes 373 and 317 (32 heads of 128).
_MANY_COLUMNS, _FEW_COLUMNS = 64, 32
# Channels and tokens of a program of the convolution.
_CHANNELS = 256
_TOKENS = 16


@triton.jit
def _silu(x, DTYPE: tl.constexpr):
    """Return SiLU of x, rounded before and after it as if each ran alone."""
    x = x.to(DTYPE).to(tl.float32)
    return (x * tl.sigmoid(x)).to(DTYPE)


@triton.jit
def _unit(x, EPS: tl.constexpr, AXIS: tl.constexpr):
    """Return vectors (along the axis) of length one."""
    return x * tl.expand_dims(1.0 / tl.sqrt(tl.sum(x * x, AXIS) + EPS), AXIS)


@triton.jit
def _moved(lengths_ptr, slots_ptr, tables_ptr, row, table_row, BLOCK_SIZE: tl.constexpr):
    """Return the block of a decoding row's state, the one that it moves to, and whether there is a state yet."""
    length = tl.load(lengths_ptr + row)
    place = tl.maximum(length - 2, 0) // BLOCK_SIZE
    source = tl.load(tables_ptr + row.to(tl.int64) * table_row + place).to(tl.int64)
    target = tl.load(slots_ptr + row).to(tl.int64) // BLOCK_SIZE
    return source, target, length > 1


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["slots_ptr", "tables_ptr"])
def _convolve_decodes(
    x_ptr, weight_ptr, bias_ptr, inputs_ptr, out_ptr, lengths_ptr, slots_ptr, tables_ptr, table_row, x_token,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program convolves one row's channels and moves their last inputs along."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    c_C = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there_C = c_C < CHANNELS
    p_P1 = tl.arange(0, PLACES)[:, None]
    there_PC = (p_P1 < LENGTH - 1) & there_C[None, :]
    source, target, known = _moved(lengths_ptr, slots_ptr, tables_ptr, row, table_row, BLOCK_SIZE)
    weight_PC = tl.load(weight_ptr + c_C[None, :] * LENGTH + p_P1, mask=there_PC, other=0.0).to(tl.float32)
    weight_C = tl.load(weight_ptr + c_C * LENGTH + LENGTH - 1, mask=there_C, other=0.0).to(tl.float32)
    cell_PC = p_P1 * CHANNELS + c_C[None, :]
    old_PC = tl.load(inputs_ptr + source * (LENGTH - 1) * CHANNELS + cell_PC, mask=there_PC & known, other=0.0)
    if EARLY:
        gdc_wait()
    x_C = tl.load(x_ptr + row.to(tl.int64) * x_token + c_C, mask=there_C, other=0.0)
    acc_C = x_C.to(tl.float32) * weight_C + tl.sum(old_PC.to(tl.float32) * weight_PC, 0)
    if HAS_BIAS:
        acc_C += tl.load(bias_ptr + c_C, mask=there_C, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * CHANNELS + c_C, _silu(acc_C, out_ptr.dtype.element_ty), mask=there_C)
    # The block may be the same: other threads have read what is overwritten.
    tl.debug_barrier()
    to_ptr = inputs_ptr + target * (LENGTH - 1) * CHANNELS
    tl.store(to_ptr + cell_PC - CHANNELS, old_PC, mask=there_PC & (p_P1 > 0) & (target > 0))
    tl.store(to_ptr + (LENGTH - 2) * CHANNELS + c_C, x_C.to(inputs_ptr.dtype.element_ty), mask=there_C & (target > 0))


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["slots_ptr", "tables_ptr"])
def _step(
    x_ptr, g_ptr, beta_ptr, log_rate_ptr, offset_ptr, states_ptr, out_ptr, lengths_ptr, slots_ptr, tables_ptr,
    table_row, g_token, beta_token,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program changes some columns of one head's state of one row.

    With `log_rate_ptr`, g and beta are what they are made of; see gated_delta.Gates.
    """
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    v_V = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    k_K = tl.arange(0, KEYS)
    there_K, there_V = k_K < KEY, v_V < VALUE
    source, target, known = _moved(lengths_ptr, slots_ptr, tables_ptr, tl.program_id(0), table_row, BLOCK_SIZE)
    inside_KV = there_K[:, None] & there_V[None, :]
    cell_KV = head * KEY * VALUE + k_K[:, None] * VALUE + v_V[None, :]
    size: tl.constexpr = HEADS * KEY * VALUE
    state_KV = tl.load(states_ptr + source * size + cell_KV, mask=inside_KV & known, other=0.0)
    if log_rate_ptr is not None:
        rate = tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
        offset = tl.load(offset_ptr + head).to(tl.float32)
    if EARLY:
        gdc_wait()
    width: tl.constexpr = HEADS // SHARE * KEY
    line_ptr = x_ptr + row * (2 * width + HEADS * VALUE)
    near = head // SHARE * KEY
    q_K = tl.load(line_ptr + near + k_K, mask=there_K, other=0.0).to(tl.float32)
    key_K = tl.load(line_ptr + width + near + k_K, mask=there_K, other=0.0).to(tl.float32)
    value_V = tl.load(line_ptr + 2 * width + head * VALUE + v_V, mask=there_V, other=0.0).to(tl.float32)
    q_K = q_K * (SCALE / tl.sqrt(tl.sum(q_K * q_K, 0) + EPS))
    key_K = key_K * (1.0 / tl.sqrt(tl.sum(key_K * key_K, 0) + EPS))
    g = tl.load(g_ptr + row * g_token + head).to(tl.float32)
    beta = tl.load(beta_ptr + row * beta_token + head).to(tl.float32)
    if log_rate_ptr is not None:
        g += offset
        # Softplus is linear from 20 on, as PyTorch's.
        g = -rate * tl.where(g > 20.0, g, tl.log(1.0 + tl.exp(tl.minimum(g, 20.0))))
        beta = (1.0 / (1.0 + tl.exp(tl.minimum(-beta, 80.0)))).to(beta_ptr.dtype.element_ty).to(tl.float32)
    decay = tl.exp(g)
    state_KV *= decay
    said_V = tl.sum(key_K[:, None] * state_KV, 0)
    state_KV += key_K[:, None] * ((value_V - said_V) * beta)[None, :]
    out_V = tl.sum(q_K[:, None] * state_KV, 0)
    tl.store(states_ptr + target * size + cell_KV, state_KV, mask=inside_KV & (target > 0))
    tl.store(out_ptr + (row * HEADS + head) * VALUE + v_V, out_V.to(out_ptr.dtype.element_ty), mask=there_V)


@triton.jit
def _input(x_ptr, inputs_ptr, source, index, first, x_token, c_C, there, CHANNELS: tl.constexpr, LENGTH: tl.constexpr):
    """Return an input of the convolution: of the step's tokens, or before its first one, of the kept ones."""
    new = tl.load(x_ptr + index.to(tl.int64) * x_token + c_C, mask=there & (index >= first), other=0.0)
    place = index - first + LENGTH - 1
    line = tl.maximum(source, 0).to(tl.int64) * (LENGTH - 1) + place
    old = tl.load(inputs_ptr + line * CHANNELS + c_C, mask=there & (index < first) & (source >= 0), other=0.0)
    return tl.where(index >= first, new.to(tl.float32), old.to(tl.float32))


@triton.jit
def _convolve_prompts(
    x_ptr, weight_ptr, bias_ptr, inputs_ptr, out_ptr, tiles_ptr, x_token,
    CHANNELS: tl.constexpr, LENGTH: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program convolves some channels of some tokens of one sequence."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    first, stop = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    begin, source = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    c_1C = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    t_T1 = (first + tl.arange(0, TOKENS))[:, None]
    there_TC = (t_T1 < stop) & (c_1C < CHANNELS)
    acc_TC = tl.zeros([TOKENS, WIDTH], tl.float32)
    for place in tl.static_range(LENGTH):
        index_T1 = t_T1 + (place - LENGTH + 1)
        weight_1C = tl.load(weight_ptr + c_1C * LENGTH + place, mask=c_1C < CHANNELS, other=0.0).to(tl.float32)
        x_TC = _input(x_ptr, inputs_ptr, source, index_T1, begin, x_token, c_1C, there_TC, CHANNELS, LENGTH)
        acc_TC += x_TC * weight_1C
    if HAS_BIAS:
        acc_TC += tl.load(bias_ptr + c_1C, mask=c_1C < CHANNELS, other=0.0).to(tl.float32)
    out_TC = _silu(acc_TC, out_ptr.dtype.element_ty)
    tl.store(out_ptr + t_T1.to(tl.int64) * CHANNELS + c_1C, out_TC, mask=there_TC)


@triton.jit
def _keep_inputs(
    x_ptr, inputs_ptr, pieces_ptr, kept_ptr, x_token, CHANNELS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One program stores some channels of a sequence's last inputs, in the order of its kept states.

    The newest state may take the place of the one that the sequence continues, so it comes last.
    """
    piece_ptr = pieces_ptr + tl.program_id(0) * 8
    begin, source = tl.load(piece_ptr), tl.load(piece_ptr + 1)
    first_kept, num_kept = tl.load(piece_ptr + 4), tl.load(piece_ptr + 5)
    c_C = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there_C = c_C < CHANNELS
    for kept in range(first_kept, first_kept + num_kept):
        stop = tl.load(kept_ptr + kept * 2)
        block = tl.load(kept_ptr + kept * 2 + 1).to(tl.int64)
        for place in tl.static_range(LENGTH - 1):
            index = stop - (LENGTH - 1) + place
            x_C = _input(x_ptr, inputs_ptr, source, index, begin, x_token, c_C, there_C, CHANNELS, LENGTH)
            line = block * (LENGTH - 1) + place
            tl.store(inputs_ptr + line * CHANNELS + c_C, x_C.to(inputs_ptr.dtype.element_ty), mask=there_C)


@triton.jit
def _inverse(a_NN, CHUNK: tl.constexpr, DOUBLINGS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + A, whose A (N, N) is strictly lower triangular.

    The blocks on the diagonal are solved row by row, all at once. With the inverse D of twice-as-large blocks' diagonal
    and L what these hold below it, their inverse is D - D L D, since D L D L is zero.
    """
    blocks: tl.constexpr = 1 << DOUBLINGS
    CORNER: tl.constexpr = CHUNK >> DOUBLINGS
    at_B = tl.arange(0, blocks)
    n_C = tl.arange(0, CORNER)
    same_BB = (at_B[:, None] == at_B[None, :])[:, None, :, None]
    # A row is still that of -A when its turn comes.
    x_BCC = -tl.sum(tl.where(same_BB, tl.reshape(a_NN, [blocks, CORNER, blocks, CORNER]), 0.0), 2)
    for row in range(1, CORNER):
        here_C = (n_C == row)[None, :, None]
        own_BC = tl.sum(tl.where(here_C, x_BCC, 0.0), 1)
        own_BC += tl.sum(own_BC[:, :, None] * x_BCC, 1)
        x_BCC = tl.where(here_C, own_BC[:, None, :], x_BCC)
    x_BCC += tl.where(n_C[:, None] == n_C[None, :], 1.0, 0.0)[None, :, :]
    x_NN = tl.reshape(tl.where(same_BB, x_BCC[:, :, None, :], 0.0), [CHUNK, CHUNK])
    n_N = tl.arange(0, CHUNK)
    for level in tl.static_range(DOUBLINGS):
        row_N1, column_1N = n_N[:, None] // (CORNER << level), n_N[None, :] // (CORNER << level)
        below_NN = tl.where((row_N1 == column_1N + 1) & (column_1N % 2 == 0), a_NN, 0.0)
        half_NN = tl.dot(x_NN, below_NN, input_precision=PRECISION)
        x_NN -= tl.dot(half_NN, x_NN, input_precision=PRECISION)
    return x_NN


@triton.jit
def _solve(
    x_ptr, g_ptr, beta_ptr, u_ptr, w_ptr, q_ptr, key_ptr, within_ptr, ends_ptr, chunks_ptr, g_token, beta_token,
    HEADS: tl.constexpr, SHARE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, CHUNK: tl.constexpr, DOUBLINGS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes all of one chunk and one head that needs no state.

    U (N, V), W (N, K), queries decayed since the chunk's begin and keys decayed until its end (N, K), the weights of
    values within it (N, N), and its whole decay.
    """
    chunk_ptr = chunks_ptr + tl.program_id(0) * 4
    first, count = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
    head = tl.program_id(1)
    n_N = tl.arange(0, CHUNK)
    k_K = tl.arange(0, KEYS)
    v_V = tl.arange(0, VALUES)
    live_N = n_N < count
    token_N = (first + n_N).to(tl.int64)
    width: tl.constexpr = HEADS // SHARE * KEY
    line_N1 = x_ptr + (token_N * (2 * width + HEADS * VALUE))[:, None]
    seen_NK = live_N[:, None] & (k_K < KEY)[None, :]
    place_N1 = (token_N * HEADS + head)[:, None]
    near_1K = head // SHARE * KEY + k_K[None, :]
    key_NK = _unit(tl.load(line_N1 + width + near_1K, mask=seen_NK, other=0.0).to(tl.float32), EPS, 1)
    # Padding neither decays nor writes.
    g_N = tl.load(g_ptr + token_N * g_token + head, mask=live_N, other=0.0).to(tl.float32)
    beta_N = tl.load(beta_ptr + token_N * beta_token + head, mask=live_N, other=0.0).to(tl.float32)
    sum_N = tl.cumsum(g_N, 0)
    whole = tl.sum(g_N, 0)
    tl.store(ends_ptr + tl.program_id(0) * HEADS + head, tl.exp(whole))
    since_NN = sum_N[:, None] - sum_N[None, :]
    stored: tl.constexpr = u_ptr.dtype.element_ty
    left_NK = key_NK * tl.exp(whole - sum_N)[:, None]
    tl.store(key_ptr + place_N1 * KEY + k_K[None, :], left_NK.to(stored), mask=seen_NK)
    q_NK = _unit(tl.load(line_N1 + near_1K, mask=seen_NK, other=0.0).to(tl.float32), EPS, 1) * SCALE
    decay_NN = tl.exp(tl.where(n_N[:, None] < n_N[None, :], float("-inf"), since_NN))
    within_NN = tl.dot(q_NK.to(stored), tl.trans(key_NK.to(stored)), input_precision=PRECISION) * decay_NN
    cell_NN = within_ptr + place_N1 * CHUNK + n_N[None, :]
    tl.store(cell_NN, within_NN.to(stored), mask=live_N[:, None])
    q_NK *= tl.exp(sum_N)[:, None]
    tl.store(q_ptr + place_N1 * KEY + k_K[None, :], q_NK.to(stored), mask=seen_NK)
    decay_NN = tl.exp(tl.where(n_N[:, None] <= n_N[None, :], float("-inf"), since_NN))
    written_NK = key_NK * beta_N[:, None]
    a_NN = tl.dot(written_NK, tl.trans(key_NK), input_precision=PRECISION) * decay_NN
    x_NN = _inverse(a_NN, CHUNK, DOUBLINGS, PRECISION).to(stored)
    w_NK = tl.dot(x_NN, (written_NK * tl.exp(sum_N)[:, None]).to(stored), input_precision=PRECISION)
    tl.store(w_ptr + place_N1 * KEY + k_K[None, :], w_NK.to(stored), mask=seen_NK)
    seen_NV = live_N[:, None] & (v_V < VALUE)[None, :]
    value_NV = tl.load(line_N1 + 2 * width + head * VALUE + v_V[None, :], mask=seen_NV, other=0.0).to(tl.float32)
    u_NV = tl.dot(x_NN, (value_NV * beta_N[:, None]).to(stored), input_precision=PRECISION)
    tl.store(u_ptr + place_N1 * VALUE + v_V[None, :], u_NV.to(stored), mask=seen_NV)


@triton.jit
def _scan(
    u_ptr, w_ptr, q_ptr, key_ptr, within_ptr, ends_ptr, states_ptr, out_ptr, pieces_ptr, chunks_ptr,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program takes some columns of one head's state of one sequence through its chunks."""
    piece_ptr = pieces_ptr + tl.program_id(0) * 8
    source = tl.load(piece_ptr + 1)
    first_chunk, num_chunks = tl.load(piece_ptr + 2), tl.load(piece_ptr + 3)
    head = tl.program_id(1)
    v_V = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    k_K = tl.arange(0, KEYS)
    n_N = tl.arange(0, CHUNK)
    inside_KV = (k_K < KEY)[:, None] & (v_V < VALUE)[None, :]
    cell_KV = head * KEY * VALUE + k_K[:, None] * VALUE + v_V[None, :]
    size: tl.constexpr = HEADS * KEY * VALUE
    stored: tl.constexpr = u_ptr.dtype.element_ty
    from_KV = states_ptr + tl.maximum(source, 0).to(tl.int64) * size + cell_KV
    state_KV = tl.load(from_KV, mask=inside_KV & (source >= 0), other=0.0)
    for chunk in tl.range(first_chunk, first_chunk + num_chunks, num_stages=STAGES):
        first, count = tl.load(chunks_ptr + chunk * 4), tl.load(chunks_ptr + chunk * 4 + 1)
        block = tl.load(chunks_ptr + chunk * 4 + 2).to(tl.int64)
        live_N = n_N < count
        place_N1 = ((first + n_N).to(tl.int64) * HEADS + head)[:, None]
        seen_NK = live_N[:, None] & (k_K < KEY)[None, :]
        seen_NV = live_N[:, None] & (v_V < VALUE)[None, :]
        w_NK = tl.load(w_ptr + place_N1 * KEY + k_K[None, :], mask=seen_NK, other=0.0)
        u_NV = tl.load(u_ptr + place_N1 * VALUE + v_V[None, :], mask=seen_NV, other=0.0)
        q_NK = tl.load(q_ptr + place_N1 * KEY + k_K[None, :], mask=seen_NK, other=0.0)
        key_NK = tl.load(key_ptr + place_N1 * KEY + k_K[None, :], mask=seen_NK, other=0.0)
        within_NN = tl.load(within_ptr + place_N1 * CHUNK + n_N[None, :], mask=live_N[:, None], other=0.0)
        end = tl.load(ends_ptr + chunk * HEADS + head)
        before_KV = state_KV.to(stored)
        written_NV = u_NV - tl.dot(w_NK, before_KV, input_precision=PRECISION)
        written_NV = written_NV.to(stored)
        out_NV = tl.dot(q_NK, before_KV, input_precision=PRECISION)
        out_NV = tl.dot(within_NN, written_NV, out_NV, input_precision=PRECISION)
        state_KV = tl.dot(tl.trans(key_NK), written_NV, state_KV * end, input_precision=PRECISION)
        tl.store(out_ptr + place_N1 * VALUE + v_V[None, :], out_NV.to(out_ptr.dtype.element_ty), mask=seen_NV)
        tl.store(states_ptr + block * size + cell_KV, state_KV, mask=inside_KV & (block > 0))


@dataclass(eq=False)
class _DeltaPlan:
    """What a step's prompts need, int32 on the device, the same for all layers of a group.

    Attributes:
        tiles: of the convolution: first token, the end, its sequence's first token in the step, and the block of what
            it continues, -1 for none.
        chunks: first token, number of tokens, the block where the state after it goes, 0 for none; one field free.
        pieces: first token, the block of what it continues, first chunk, chunks, first kept state, kept states.
        kept: the token after the last one that the state knows, and the block.
    """

    tiles: Tensor
    chunks: Tensor
    pieces: Tensor
    kept: Tensor


def _plan(pieces: Sequence[StateSlice], device: torch.device) -> _DeltaPlan:
    tiles: list[tuple[int, ...]] = []
    chunks: list[tuple[int, ...]] = []
    lines: list[tuple[int, ...]] = []
    kept: list[tuple[int, int]] = []
    for piece in pieces:
        source = -1 if piece.source is None else piece.source
        begin, own = piece.first, len(chunks)
        for stop, block in piece.kept:
            stop += piece.first
            ends = [*range(begin + _CHUNK, stop, _CHUNK), stop]
            for first, end in zip([begin, *ends], ends, strict=False):
                chunks.append((first, end - first, block if end == stop else 0, 0))
            begin = stop
        for first in range(piece.first, piece.last, _TOKENS):
            tiles.append((first, min(first + _TOKENS, piece.last), piece.first, source))
        lines.append((piece.first, source, own, len(chunks) - own, len(kept), len(piece.kept), 0, 0))
        kept += [(stop + piece.first, block) for stop, block in piece.kept]
    made = (torch.from_numpy(np.array(each, dtype=np.int32)) for each in (tiles, chunks, lines, kept))
    return _DeltaPlan(*(each.to(device, non_blocking=True) for each in made))


class TritonDelta:
    """See attention.delta_rule.DeltaKernels."""

    def decode(
        self,
        x_TC: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        weights: tuple[Tensor, Tensor | None],
        cache: LayerStates,
        metadata: AttnMetadata,
        rule: GatedDelta,
        out_THV: Tensor,
        gates: Gates | None = None,
    ) -> None:
        """Compute the step's first tokens, one of each decoding sequence; writes their rows of `out_THV`."""
        group, count = metadata.groups[cache.group], metadata.num_decodes
        weight_CL, bias_C = weights
        channels, length = weight_CL.shape
        mixed_DC = x_TC.new_empty((count, channels))
        early = platform_of(x_TC.device).kernel_facts(x_TC.device).early_launch
        options = {"launch_pdl": True} if early else {}
        where = (metadata.lengths_B, group.slots_T, group.tables_BN, group.tables_BN.stride(0))
        _convolve_decodes[(count, triton.cdiv(channels, _CHANNELS))](
            x_TC, weight_CL, bias_C if bias_C is not None else weight_CL, cache.inputs, mixed_DC, *where,
            x_TC.stride(0), channels, length, metadata.block_size, bias_C is not None, _CHANNELS,
            triton.next_power_of_2(max(1, length - 1)), early, num_warps=4, enable_fp_fusion=True, **options,
        )  # fmt: skip
        keys, values = _padded(rule.key_dim), min(32, _padded(rule.value_dim))
        _step[(count, rule.value_heads, triton.cdiv(rule.value_dim, values))](
            mixed_DC, g_TH, beta_TH, *(gates or (None, None)), cache.states, out_THV, *where,
            g_TH.stride(0), beta_TH.stride(0),
            rule.value_heads, rule.value_heads // rule.key_heads, rule.key_dim, rule.value_dim, rule.key_dim**-0.5,
            EPSILON, metadata.block_size, keys, values, early,
            num_warps=4, enable_fp_fusion=True, **options,
        )  # fmt: skip

    def prefill(
        self,
        x_TC: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        weights: tuple[Tensor, Tensor | None],
        cache: LayerStates,
        group: GroupMetadata,
        pieces: Sequence[StateSlice],
        rule: GatedDelta,
        out_THV: Tensor,
    ) -> None:
        """Compute the tokens of `pieces`; writes their rows of `out_THV`."""
        plan = group.extra.get("delta")
        if plan is None:
            plan = group.extra["delta"] = _plan(pieces, x_TC.device)
        assert isinstance(plan, _DeltaPlan)
        weight_CL, bias_C = weights
        channels, length = weight_CL.shape
        heads, share = rule.value_heads, rule.value_heads // rule.key_heads
        mixed_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
        columns = triton.cdiv(channels, _CHANNELS)
        _convolve_prompts[(len(plan.tiles), columns)](
            x_TC, weight_CL, bias_C if bias_C is not None else weight_CL, cache.inputs, mixed_TC, plan.tiles,
            x_TC.stride(0), channels, length, bias_C is not None, _CHANNELS, _TOKENS,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        _keep_inputs[(len(plan.pieces), columns)](
            x_TC, cache.inputs, plan.pieces, plan.kept, x_TC.stride(0), channels, length, _CHANNELS,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        u_THV = x_TC.new_empty((len(x_TC), heads, rule.value_dim))
        w_THK, q_THK, key_THK = (x_TC.new_empty((len(x_TC), heads, rule.key_dim)) for _ in range(3))
        within_THN = x_TC.new_empty((len(x_TC), heads, _CHUNK))
        ends_CH = x_TC.new_empty((len(plan.chunks), heads), dtype=torch.float32)
        made = (u_THV, w_THK, q_THK, key_THK, within_THN, ends_CH)
        precision = "ieee" if x_TC.dtype == torch.float32 else "tf32"
        keys, values = _padded(rule.key_dim), _padded(rule.value_dim)
        _solve[(len(plan.chunks), heads)](
            mixed_TC, g_TH, beta_TH, *made, plan.chunks, g_TH.stride(0), beta_TH.stride(0),
            heads, share, rule.key_dim, rule.value_dim, rule.key_dim**-0.5, EPSILON, _CHUNK, _DOUBLINGS, keys, values,
            precision, num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
        facts = platform_of(x_TC.device).kernel_facts(x_TC.device)
        programs = len(plan.pieces) * heads * triton.cdiv(rule.value_dim, _MANY_COLUMNS)
        values = min(_MANY_COLUMNS if programs >= facts.multiprocessors else _FEW_COLUMNS, values)
        ahead = x_TC.dtype != torch.float32 and facts.shared_bytes >= 160_000
        _scan[(len(plan.pieces), heads, triton.cdiv(rule.value_dim, values))](
            *made, cache.states, out_THV, plan.pieces, plan.chunks,
            heads, rule.key_dim, rule.value_dim, _CHUNK, keys, values, precision,
            2 if ahead else 1, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
