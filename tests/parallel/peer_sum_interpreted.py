"""Sums over ranks that write to one another's memory, in Triton's interpreter; test_peer_sum.py runs this.

Ranks are processes that are forked when the memory exists, so that addresses are the same in all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import triton.language as tl
from torch import Tensor

from beheld.parallel import peer_sum_kernel as kernel


def on_ranks(ranks: int, work: Callable[[int], None]) -> None:
    """Run `work` in a process for each rank."""
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(rank)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * ranks


def shared(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(sizes, dtype=dtype).share_memory_()


# The interpreter cuts bfloat16 off where a GPU rounds.
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.float16)])
def test_all_ranks_have_the_same_sum(ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", 4)
    # Rows of other sizes in turn take other numbers of programs; with the most, a program has several pieces.
    counts = (1, 1030, 7, 2048, 4 * kernel.BLOCK + 5, 1)
    buffers = shared((ranks, kernel.buffer_bytes(ranks)), torch.uint8)
    bases = torch.tensor([buffer.data_ptr() for buffer in buffers])
    chance = torch.Generator().manual_seed(ranks)
    given = [torch.randn(ranks, count, generator=chance).to(dtype) for count in counts]
    found = [shared((ranks, count), dtype) for count in counts]
    for to, each in zip(found, given, strict=True):
        to.copy_(each)

    def work(rank: int) -> None:
        epochs, stop = torch.zeros(kernel.PROGRAMS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        for each in found:
            kernel.sum_(each[rank], bases, epochs, stop.data_ptr(), rank, ranks)

    on_ranks(ranks, work)
    for count, each, sums in zip(counts, given, found, strict=True):
        wanted = torch.zeros(count)
        for part in each:
            wanted += part.float()
        assert torch.equal(sums, wanted.to(dtype).expand(ranks, -1)), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_ranks_add_long_tensors_in_turns(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one turn, of more turns than slots, and with fewer programs than before: all epochs go on."""
    monkeypatch.setattr(kernel, "TURN_PROGRAMS", 3)
    monkeypatch.setattr(kernel, "TURN_BYTES", 256)
    block = 256 // dtype.itemsize
    counts = (3 * block, 19 * block + 5, 1, 3 * block, 27 * block, block + 1)
    buffers = shared((2, kernel.buffer_bytes(2)), torch.uint8)
    bases = torch.tensor([buffer.data_ptr() for buffer in buffers])
    chance = torch.Generator().manual_seed(7)
    given = [torch.randn(2, count, generator=chance).to(dtype) for count in counts]
    found = [shared((2, count), dtype) for count in counts]
    for to, each in zip(found, given, strict=True):
        to.copy_(each)

    def work(rank: int) -> None:
        epochs, stop = torch.zeros(kernel.TURN_PROGRAMS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        for number, each in enumerate(found):
            # A rank that comes late finds that the other one has waited.
            time.sleep(0.05 * (number % 2 == rank))
            kernel.sum_in_turns_(each[rank], bases, epochs, stop.data_ptr(), rank)

    on_ranks(2, work)
    for count, each, sums in zip(counts, given, found, strict=True):
        assert torch.equal(sums, (each[0].float() + each[1].float()).to(dtype).expand(2, -1)), count


def test_waiting_ends_when_it_is_told_and_nothing_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank never comes; a step's queued sums would each wait anew."""
    monkeypatch.setattr(kernel, "_ASK_AFTER", tl.constexpr(64))
    monkeypatch.setattr(kernel, "TURN_PROGRAMS", 1)
    monkeypatch.setattr(kernel, "TURN_BYTES", 256)
    buffers = shared((2, kernel.buffer_bytes(2)), torch.uint8)
    bases = torch.tensor([buffer.data_ptr() for buffer in buffers])

    def work(_: int) -> None:
        epochs, stop = torch.zeros(kernel.PROGRAMS, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        turn_epochs = torch.zeros(kernel.TURN_PROGRAMS, dtype=torch.int32)
        kernel.sum_(torch.ones(5), bases, epochs, stop.data_ptr(), 0, 2)
        kernel.sum_in_turns_(torch.ones(5), bases, turn_epochs, stop.data_ptr(), 0)
        # These would wait without end.
        stop.zero_()
        for _ in range(3):
            kernel.sum_(torch.ones(5), bases, epochs, stop.data_ptr(), 0, 2)
            kernel.sum_in_turns_(torch.ones(500), bases, turn_epochs, stop.data_ptr(), 0)

    on_ranks(1, work)


def test_counting_goes_on_beyond_the_largest_number() -> None:
    buffers = shared((2, kernel.buffer_bytes(2)), torch.uint8)
    bases = torch.tensor([buffer.data_ptr() for buffer in buffers])
    most = 2**31 - 1
    buffers[:, : kernel.FLAG_BYTES].view(torch.int32).fill_(most)
    found = shared((2, 4), torch.float32)

    def work(rank: int) -> None:
        epochs, stop = torch.full((kernel.PROGRAMS,), most, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        for _ in range(3):
            found[rank] = torch.arange(4.0) + rank
            kernel.sum_(found[rank], bases, epochs, stop.data_ptr(), rank, 2)

    on_ranks(2, work)
    assert torch.equal(found, (2 * torch.arange(4.0) + 1).expand(2, -1))
