"""Sums and gathers of tensors over ranks on the cores of one host, through memory that they share.

Gloo sends them over the loopback interface, and wakes a thread of its own on either side.

The memory has no file on a disk: the kernel would write its pages out every few seconds, and each would fault again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Bytes of a rank's tensor in one exchange; larger ones take several.
MOST_BYTES = 4 << 20
# Numbers of different ranks lie in cache lines of their own.
_LINE = 64
# A rank looks so often for the others without a pause, then lets other threads run between two looks, then sleeps.
_SPINS, _YIELDS = 300, 4000
_SLEEP_S = 50e-6
# Gives the core to another program if one wants it, and the interpreter lock to another thread. `time.sleep(0)` always
# waits for a timer: 50 microseconds or more, and most waits are shorter.
_yield_core = ctypes.CDLL(None).sched_yield
_VIEWS = 256
# What one core writes first, another one must see first.
_ORDERED = ("x86_64", "AMD64")


@contextmanager
def made() -> Iterator[str]:
    """Make memory for a group; within the block, processes of the same user can open the path that it gives.

    It goes with the last process that has it, however that ends.

    Raises:
        OSError, RuntimeError: there is none here.
    """
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("this system has no memory without a file")
    file = os.memfd_create("beheld-ranks", os.MFD_CLOEXEC)
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


class HostSums:
    """Memory of all ranks of a group, each a process of this host.

    Exchange number e uses the half e % 2. A rank writes its tensor there and then e into its counter; once all
    counters have reached e, each reads all tensors. A half is written again in exchange e + 2, which a rank begins when
    all counters have reached e + 1: by then all have read it.

    Args:
        path: of the memory that one of them has made, see `made`.

    Raises:
        OSError, RuntimeError: there is no such memory here.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        if platform.machine() not in _ORDERED:
            raise RuntimeError("this processor may show writes in another order")
        self._rank, self._size = rank, size
        self._stopped = False
        whole = size * (_LINE + 2 * MOST_BYTES)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Reserved now: where memory is limited, the process would end at its first use.
            os.posix_fallocate(file, 0, whole)
            self._memory = mmap.mmap(file, whole)
        finally:
            os.close(file)
        self._counters = memoryview(self._memory)[: size * _LINE].cast("q")
        self._step = _LINE // 8
        bytes_ = torch.frombuffer(self._memory, dtype=torch.uint8)[size * _LINE :]
        self._halves = bytes_.view(2, size, MOST_BYTES)
        self._number = 0
        # Views of both halves by type and count: a model's sums have few sizes, and views cost more than adding.
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    def sum_(self, x: Tensor) -> None:
        """Replace a contiguous `x` by its sum over all ranks, which has the same bits on each."""
        for piece in x.view(-1).split(MOST_BYTES // x.element_size()):
            parts = self._exchanged(piece)
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece.add_(part)

    def joined(self, x: Tensor) -> Tensor:
        """Return all ranks' contiguous `x`, one after another, flat."""
        flat, most = x.view(-1), MOST_BYTES // x.element_size()
        if len(flat) <= most:
            return torch.cat(self._exchanged(flat))
        out = flat.new_empty(self._size, len(flat))
        for start in range(0, len(flat), most):
            piece = flat[start : start + most]
            torch.stack(self._exchanged(piece), out=out[:, start : start + most])
        return out.view(-1)

    def _parts(self, half: int, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Return where all ranks' tensors of this form lie in a half."""
        key = half, dtype, count
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            found = [part[: count * dtype.itemsize].view(dtype) for part in self._halves[half]]
            self._views[key] = found
        return found

    def _exchanged(self, flat: Tensor) -> list[Tensor]:
        """Return all ranks' tensors, flat, which stay until the exchange after the next."""
        number = self._number = self._number + 1
        parts = self._parts(number % 2, flat.dtype, len(flat))
        parts[self._rank].copy_(flat)
        counters, step = self._counters, self._step
        counters[self._rank * step] = number
        for other in range(self._size):
            place, looks = other * step, 0
            while counters[place] < number:
                looks += 1
                if looks > _SPINS:
                    if self._stopped:
                        raise RuntimeError("Another rank is gone.")
                    if looks < _SPINS + _YIELDS:
                        _yield_core()
                    else:
                        time.sleep(_SLEEP_S)
        return parts

    def abort(self) -> None:
        """End a wait for ranks that are gone; any thread may call it."""
        self._stopped = True
