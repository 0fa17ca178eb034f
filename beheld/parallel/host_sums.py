"""Sums and gathers of small tensors over ranks on the cores of one host, through memory that they share.

Gloo sends them over the loopback interface, and wakes a thread of its own on either side.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from pathlib import Path

import torch
from torch import Tensor

# Bytes of a rank's tensor at most; larger ones are gloo's.
MOST_BYTES = 4 << 20
# Numbers of different ranks lie in cache lines of their own.
_LINE = 64
# A rank looks so often for the others without a pause, then lets other threads run, then sleeps between two looks.
_SPINS, _YIELDS = 300, 300
_SLEEP_S = 50e-6
_VIEWS = 256
# What one core writes first, another one must see first.
_ORDERED = ("x86_64", "AMD64")


class HostSums:
    """Memory of all ranks of a group, each a process of this host.

    Exchange number e uses the half e % 2. A rank writes its tensor there and then e into its counter; once all
    counters have reached e, each reads all tensors. A half is written again in exchange e + 2, which a rank begins when
    all counters have reached e + 1: by then all have read it.

    Args:
        path: a file for this group, which all ranks open.

    Raises:
        OSError, RuntimeError: there is no such memory here.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        if platform.machine() not in _ORDERED:
            raise RuntimeError("this processor may show writes in another order")
        if not hasattr(os, "posix_fallocate"):
            raise RuntimeError("this system does not reserve memory of files")
        self._rank, self._size = rank, size
        self._stopped = False
        whole = size * (_LINE + 2 * MOST_BYTES)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Reserved now: a full disk would end the process at its first use.
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

    def takes(self, x: Tensor) -> bool:
        """True if `x` is small enough."""
        return x.numel() * x.element_size() <= MOST_BYTES

    def sum_(self, x: Tensor) -> None:
        """Replace a contiguous `x` by its sum over all ranks, which has the same bits on each."""
        flat = x.view(-1)
        parts = self._exchanged(flat)
        torch.add(parts[0], parts[1], out=flat)
        for part in parts[2:]:
            flat.add_(part)

    def joined(self, x: Tensor) -> Tensor:
        """Return all ranks' contiguous `x`, one after another, flat."""
        return torch.cat(self._exchanged(x.view(-1)))

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
                    time.sleep(0 if looks < _SPINS + _YIELDS else _SLEEP_S)
        return parts

    def abort(self) -> None:
        """End a wait for ranks that are gone; any thread may call it."""
        self._stopped = True
