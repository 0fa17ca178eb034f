"""Memory of the host in huge pages, for what is read from one end to the other again and again: weights and caches.

A processor asks its table of pages again for each 4 KiB otherwise, and fetches nothing ahead across the end of a page.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
# What is larger has a mapping of its own; less shares one with what comes after it. Pages take memory when written.
OWN, _SHARED = 16 << 20, 64 << 20
_LINE = 64
# So few weights stay in the processor's last cache, where huge pages gain nothing. To find one takes up to 7 ms of a
# start, where its 512 usual ones take 1.
_FEW = 32 << 20
# Huge pages that a thread brings in with one call, which keeps no interpreter lock: some 10 ms.
_AT_A_TIME = 16 * HUGE_PAGE


def zeros(num_bytes: int, small: int = 0) -> Tensor:
    """Return bytes, all zero, as pages that take no memory and no time until they are written.

    They are mapped here: the heap, which the allocator settings let serve up to 32 MiB, writes zeros over what it has.
    From the size of a huge page on they begin with one: a page that began before would hold little else.

    Args:
        small: bytes at the beginning, a multiple of a huge page, that stay in usual pages, so that few numbers take
            little memory.
    """
    pages, start = _mapped(num_bytes, small)
    return torch.frombuffer(pages, dtype=torch.uint8)[start : start + num_bytes]


def _mapped(num_bytes: int, small: int = 0) -> tuple[mmap.mmap, int]:
    """Return a mapping, and where in it the bytes of `zeros` begin."""
    spare = HUGE_PAGE if num_bytes >= HUGE_PAGE else 0
    pages = mmap.mmap(-1, num_bytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE if spare else 0
    # A mapping begins with a page, and so does a huge page.
    first = start + small
    if hasattr(mmap, "MADV_HUGEPAGE") and first < len(pages):
        # Kernels without such pages refuse.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, first, len(pages) - first)
    return pages, start


class _Shared:
    """A mapping that tensors share, one after the other; it goes with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)
        self._usual = False

    def expect(self, usual: bool) -> None:
        with self._lock:
            if usual is not self._usual:
                # What is left has the other pages.
                self._usual, self._left = usual, torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        with self._lock:
            if num_bytes > len(self._left):
                self._left = zeros(_SHARED, small=_SHARED if self._usual else 0)
            taken, self._left = self._left[:num_bytes], self._left[num_bytes + -num_bytes % _LINE :]
        return taken


_shared = _Shared()


class _Reserve:
    """A mapping for weights to come, whose pages a thread brings in, from the first on, until one is taken."""

    def __init__(self, num_bytes: int) -> None:
        self._pages, self._start = _mapped(num_bytes)
        self._whole = torch.frombuffer(self._pages, dtype=torch.uint8)[self._start : self._start + num_bytes]
        self._lock = threading.Lock()
        self._brought = self._taken = 0
        self._ended = False
        self._thread = threading.Thread(target=self._bring, name="memory ahead")
        self._thread.start()

    def _bring(self) -> None:
        while True:
            with self._lock:
                stop = min(self._brought + _AT_A_TIME, len(self._whole))
                if self._ended or self._brought == stop:
                    return
                # A page comes when its first byte is written. `madvise` would hold up all that map memory meanwhile.
                self._whole[self._brought : stop : HUGE_PAGE].zero_()
                self._brought = stop

    def take(self, num_bytes: int) -> Tensor | None:
        """Return the next bytes, or None if so many are not left."""
        # What is taken is written by its owner alone.
        self._ended = True
        with self._lock:
            start = self._taken
            if start + num_bytes > len(self._whole):
                return None
            self._taken += num_bytes + -num_bytes % _LINE
        return self._whole[start : start + num_bytes]

    def end(self) -> None:
        """End the thread, and give back the pages that were not taken."""
        self._ended = True
        self._thread.join()
        unused = self._start + self._taken + -self._taken % HUGE_PAGE
        if unused < len(self._pages):
            self._pages.madvise(mmap.MADV_DONTNEED, unused, len(self._pages) - unused)


_now: _Reserve | None = None


@contextlib.contextmanager
def ahead(num_bytes: int) -> Iterator[None]:
    """Bring in memory for so many bytes of weights in a thread; what `empty` returns inside the block lies there first.

    To find and clear a huge page takes 1 ms and more, half a second for the weights of a small model, which another
    core spends while this one imports the model's class. Few bytes, and those of a second engine that starts at the
    same time, come when they are written.
    """
    global _now
    if num_bytes <= _FEW or _now is not None:
        yield
        return
    made = _now = _Reserve(num_bytes)
    try:
        yield
    finally:
        _now = None
        made.end()


def expect(num_bytes: int) -> None:
    """Tell how many bytes of weights come next: few are written to usual pages, until more are expected."""
    _shared.expect(usual=num_bytes <= _FEW)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in huge pages whose numbers are written next; for what stays as long as its neighbours do."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    space = None if _now is None else _now.take(num_bytes)
    if space is None:
        space = zeros(num_bytes) if num_bytes > OWN else _shared.take(num_bytes)
    return space.view(dtype).view(shape)


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in huge pages; see `empty`."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
