"""A Triton kernel that adds up small tensors of several GPUs: each writes its own into all others' memory, once.

A library's collective takes some 18 microseconds for a row and 39 for 256 of them, because it goes in rings and in
pieces with copies between; this one takes 5 and 19 (two H100, rows of 5,120 numbers). One program sums one piece:

    write the piece into each other rank's slot  ->  say so by a flag there  ->  wait for their flags here  ->  add

Every program counts its own sums ("epoch"). A rank is at most one sum ahead of another, because it waits for the
other's flag of the same epoch; so two slots in turn are enough, and no rank has to say that it has read.

The buffer of a rank, at the same offsets on each:

    flags   int32 (PROGRAMS, MAX_RANKS)              the epoch that a rank has written, by program and rank
    slots   bytes (2, ranks, PROGRAMS, SLOT_BYTES)   by the epoch's parity, rank and program

Ranks add in their order, in float32, so that all have the same bits.
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
# How often a flag is read before the host is asked whether to give up, which takes longer.
_ASK_AFTER: tl.constexpr = tl.constexpr(1024)


def buffer_bytes(ranks: int) -> int:
    """Return the size of a rank's buffer."""
    return FLAG_BYTES + 2 * ranks * PROGRAMS * SLOT_BYTES


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
            slot_ptr = slot.to(tl.pointer_type(x_ptr.dtype.element_ty))
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
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            tries = 0
            stop = 0
            # By difference: counting goes on beyond the largest number.
            while (seen - epoch < 0) & (stop == 0):
                seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
                tries += 1
                if tries % _ASK_AFTER == 0:
                    stop = tl.load(stop_ptr.to(tl.pointer_type(tl.int32)), volatile=True)
    tl.debug_barrier()
    for first in range(0, piece, BLOCK):
        inside_B = start + first + i_B < count
        sum_B = tl.zeros((BLOCK,), dtype=tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                part_B = tl.load(x_ptr + start + first + i_B, mask=inside_B)
            else:
                slot = own + place + ((side + rank) * PROGRAMS + program).to(tl.int64) * SLOT_BYTES
                slot_ptr = slot.to(tl.pointer_type(x_ptr.dtype.element_ty))
                # From the cache that all of the device shares: other devices write there.
                part_B = tl.load(slot_ptr + first + i_B, mask=inside_B, cache_modifier=".cg")
            sum_B += part_B.to(tl.float32)
        tl.store(x_ptr + start + first + i_B, sum_B.to(x_ptr.dtype.element_ty), mask=inside_B)
    tl.store(epochs_ptr + program, epoch)


def most_numbers(ranks: int, item_bytes: int) -> int:
    """Return how many numbers of `item_bytes` are summed so at most.

    Each rank sends its tensor to all others, so more ranks send more than in a ring, which is better for many bytes.
    """
    return PROGRAMS * SLOT_BYTES // (item_bytes * (ranks - 1))


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
