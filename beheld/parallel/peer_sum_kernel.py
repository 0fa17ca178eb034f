"""Triton kernels that add up tensors of several GPUs: each writes its own into all others' memory, once.

A library's collective takes some 18 microseconds for a row and 39 for 256 of them, because it goes in rings and in
pieces with copies between; this one takes 4, and those below 13 (two H200, rows of 5,120 numbers). One program sums one
piece:

    write the piece into each other rank's slot  ->  say so by a flag there  ->  wait for their flags here  ->  add

Every program counts its own sums ("epoch"). A rank is at most one sum ahead of another, because it waits for the
other's flag of the same epoch; so two slots in turn are enough, and no rank has to say that it has read.

The buffer of a rank, at the same offsets on each:

    flags   int32 (PROGRAMS, MAX_RANKS)              the epoch that a rank has written, by program and rank
    slots   bytes (2, ranks, PROGRAMS, SLOT_BYTES)   by the epoch's parity, rank and program

Ranks add in their order, in float32, so that all have the same bits.

Two ranks add up tensors of any size so, in turns: a program writes the piece of its next turn, then adds that of this
one, so that links are busy while it adds. It has four slots, because a rank is at most three turns ahead of what
another one has read. 8,192 rows take 248 microseconds (338 GB/s each way) where the library takes 318, and 256 rows 13.
More ranks would send more than a ring does.

    turn flags   int32 (TURN_PROGRAMS)                           the turn that the other rank has written, by program
    turn slots   bytes (TURN_SLOTS, TURN_PROGRAMS, TURN_BYTES)   by the turn modulo TURN_SLOTS, and program
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# With 128 programs that wait, of 132 multiprocessors, a sum takes 370 microseconds now and then; with 64 none did.
PROGRAMS = 64
SLOT_BYTES = 64 << 10
MAX_RANKS = 8
FLAG_BYTES = PROGRAMS * MAX_RANKS * 4
BLOCK = 1024
TURN_PROGRAMS = 256
TURN_BYTES = 16 << 10
TURN_SLOTS = 4
TURN_WARPS = 8
# How often a flag is read before the host is asked whether to give up: some 0.2 s. Programs that all ask the host after
# 1,024 reads make a sum of 245 microseconds one of 16,000.
_ASK_AFTER: tl.constexpr = tl.constexpr(1 << 18)


def turns_start(ranks: int) -> int:
    """Return where the flags of turns begin in a rank's buffer, in bytes."""
    return FLAG_BYTES + 2 * ranks * PROGRAMS * SLOT_BYTES


def buffer_bytes(ranks: int) -> int:
    """Return the size of a rank's buffer."""
    return turns_start(ranks) + (TURN_PROGRAMS * (4 + TURN_SLOTS * TURN_BYTES) if ranks == 2 else 0)


@triton.jit
def _aligned(address, x_ptr):
    """Return a pointer like `x_ptr`, to 16 bytes; from a number alone a thread would move two bytes at a time."""
    return tl.multiple_of(address.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)


@triton.jit
def _wait(flag_ptr, epoch, stop_ptr):
    """Wait until the flag has come to the epoch, or until nothing is to be waited for any more."""
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    tries = 0
    stop = 0
    # By difference: counting goes on beyond the largest number.
    while (seen - epoch < 0) & (stop == 0):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        tries += 1
        if tries % _ASK_AFTER == 0:
            stop = tl.load(stop_ptr.to(tl.pointer_type(tl.int32)), volatile=True)
    if stop != 0:
        # As if the other one had gone on for long: nothing that comes asks again.
        tl.atomic_xchg(flag_ptr, epoch + (1 << 30), sem="relaxed", scope="sys")


@triton.jit
def _sum(
    x_ptr,
    count,
    piece,
    bases_ptr,
    epochs_ptr,
    stop_ptr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_RANKS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See the file. x (count) is replaced by the sum; a program has `piece` numbers, a multiple of BLOCK.

    bases: int64 (RANKS), where each rank's buffer is in this process. epochs: int32 (PROGRAMS). stop: int32 of the
    host's pinned memory; not 0 once nothing is to be waited for any more.
    """
    program = tl.program_id(0)
    start = program * piece
    epoch = tl.load(epochs_ptr + program) + 1
    side = (epoch & 1) * RANKS
    i_B = tl.arange(0, BLOCK)
    own = tl.load(bases_ptr + RANK)
    place: tl.constexpr = FLAG_BYTES
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            slot = tl.load(bases_ptr + rank) + place + ((side + RANK) * PROGRAMS + program).to(tl.int64) * SLOT_BYTES
            slot_ptr = _aligned(slot, x_ptr)
            for first in range(0, piece, BLOCK):
                inside_B = start + first + i_B < count
                tl.store(slot_ptr + first + i_B, tl.load(x_ptr + start + first + i_B, mask=inside_B), mask=inside_B)
    # All threads of this program have written.
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = tl.load(bases_ptr + rank) + (program * MAX_RANKS + RANK) * 4
            tl.atomic_xchg(flag.to(tl.pointer_type(tl.int32)), epoch, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag_ptr = (own + (program * MAX_RANKS + rank) * 4).to(tl.pointer_type(tl.int32))
            _wait(flag_ptr, epoch, stop_ptr)
    tl.debug_barrier()
    for first in range(0, piece, BLOCK):
        inside_B = start + first + i_B < count
        sum_B = tl.zeros((BLOCK,), dtype=tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                part_B = tl.load(x_ptr + start + first + i_B, mask=inside_B)
            else:
                slot = own + place + ((side + rank) * PROGRAMS + program).to(tl.int64) * SLOT_BYTES
                slot_ptr = _aligned(slot, x_ptr)
                # From the cache that all of the device shares: other devices write there.
                part_B = tl.load(slot_ptr + first + i_B, mask=inside_B, cache_modifier=".cg")
            sum_B += part_B.to(tl.float32)
        tl.store(x_ptr + start + first + i_B, sum_B.to(x_ptr.dtype.element_ty), mask=inside_B)
    tl.store(epochs_ptr + program, epoch)


@triton.jit
def _place(turn, BLOCK: tl.constexpr):
    """Return where this program's piece of a turn lies in the tensor, (BLOCK)."""
    return (tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _slot(x_ptr, buffer, epoch, PROGRAMS: tl.constexpr, SLOTS: tl.constexpr, BYTES: tl.constexpr):
    """Return where a buffer holds this program's piece of the turn that the epoch counts."""
    slot = (epoch & (SLOTS - 1)) * PROGRAMS + tl.program_id(0)
    return _aligned(buffer + PROGRAMS * 4 + slot.to(tl.int64) * BYTES, x_ptr)


@triton.jit
def _write(
    x_ptr,
    count,
    turn,
    epoch,
    other,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write this program's piece of a turn where the other rank reads it, and say so there."""
    place_B = _place(turn, BLOCK)
    slot_ptr = _slot(x_ptr, other, epoch, PROGRAMS, SLOTS, BYTES)
    tl.store(slot_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + place_B, mask=place_B < count), mask=place_B < count)
    # All threads of this program have written.
    tl.debug_barrier()
    flag = other + tl.program_id(0) * 4
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int32)), epoch, sem="release", scope="sys")


@triton.jit
def _sum_in_turns(
    x_ptr,
    count,
    turns,
    bases_ptr,
    turns_start,
    epochs_ptr,
    stop_ptr,
    RANK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See the file. x (count) is replaced by the sum of two ranks; a program's turn has BLOCK numbers, of BYTES in all.

    bases: int64 (2), where each rank's buffer is in this process. epochs: int32 (PROGRAMS). stop: as in _sum.
    """
    program = tl.program_id(0)
    other = tl.load(bases_ptr + 1 - RANK) + turns_start
    own = tl.load(bases_ptr + RANK) + turns_start
    flag_ptr = (own + program * 4).to(tl.pointer_type(tl.int32))
    first = tl.load(epochs_ptr + program) + 1
    _write(x_ptr, count, 0, first, other, PROGRAMS, SLOTS, BYTES, BLOCK)
    for turn in range(turns):
        epoch = first + turn
        if turn + 1 < turns:
            _write(x_ptr, count, turn + 1, epoch + 1, other, PROGRAMS, SLOTS, BYTES, BLOCK)
        _wait(flag_ptr, epoch, stop_ptr)
        tl.debug_barrier()
        place_B = _place(turn, BLOCK)
        inside_B = place_B < count
        # From the cache that all of the device shares: the other device writes there.
        slot_ptr = _slot(x_ptr, own, epoch, PROGRAMS, SLOTS, BYTES)
        part_B = tl.load(slot_ptr + tl.arange(0, BLOCK), mask=inside_B, cache_modifier=".cg")
        sum_B = tl.load(x_ptr + place_B, mask=inside_B).to(tl.float32) + part_B.to(tl.float32)
        tl.store(x_ptr + place_B, sum_B.to(x_ptr.dtype.element_ty), mask=inside_B)
    tl.store(epochs_ptr + program, first + turns - 1)


def most_numbers(ranks: int, item_bytes: int) -> int:
    """Return how many numbers of `item_bytes` are summed so at most.

    Each rank sends its tensor to all others, so more ranks send more than in a ring, which is better for many bytes.
    """
    most = PROGRAMS * SLOT_BYTES // (ranks - 1)
    return (most // 2 if ranks == 2 else most) // item_bytes


def turn_numbers(item_bytes: int) -> int:
    """Return how many numbers of `item_bytes` all programs add in a turn."""
    return TURN_PROGRAMS * TURN_BYTES // item_bytes


def sum_(x: Tensor, bases_R: Tensor, epochs_P: Tensor, stop_address: int, rank: int, ranks: int) -> None:
    """Replace a contiguous `x` of at most `most_numbers` numbers by its sum over the ranks."""
    count = x.numel()
    programs = min(PROGRAMS, triton.cdiv(count, BLOCK))
    piece = triton.cdiv(triton.cdiv(count, programs), BLOCK) * BLOCK
    _sum[(programs,)](
        x,
        count,
        piece,
        bases_R,
        epochs_P,
        stop_address,
        RANK=rank,
        RANKS=ranks,
        PROGRAMS=PROGRAMS,
        MAX_RANKS=MAX_RANKS,
        FLAG_BYTES=FLAG_BYTES,
        SLOT_BYTES=SLOT_BYTES,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )


def sum_in_turns_(x: Tensor, bases_R: Tensor, epochs_P: Tensor, stop_address: int, rank: int) -> None:
    """Replace a contiguous `x` of any size by its sum over two ranks.

    Args:
        epochs_P: int32 (TURN_PROGRAMS), of these sums alone.
    """
    block = TURN_BYTES // x.element_size()
    pieces = triton.cdiv(x.numel(), block)
    programs = min(TURN_PROGRAMS, pieces)
    _sum_in_turns[(programs,)](
        x,
        x.numel(),
        triton.cdiv(pieces, programs),
        bases_R,
        turns_start(2),
        epochs_P,
        stop_address,
        RANK=rank,
        PROGRAMS=TURN_PROGRAMS,
        SLOTS=TURN_SLOTS,
        BYTES=TURN_BYTES,
        BLOCK=block,
        num_warps=TURN_WARPS,
        enable_fp_fusion=True,
    )
