"""Memory of the host in huge pages, for what is read from one end to the other again and again: weights and caches.

A processor asks its table of pages again for each 4 KiB otherwise, and fetches nothing ahead across the end of a page.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
# What is larger has a mapping of its own; less shares one with what comes after it. Pages take memory when written.
OWN, _SHARED = 16 << 20, 64 << 20
_LINE = 64
# So few weights stay in the processor's last cache, where huge pages gain nothing. To find one takes up to 7 ms of a
# start, where its 512 usual ones take 1.
_FEW = 32 << 20


def zeros(num_bytes: int, small: int = 0) -> Tensor:
    """Return bytes, all zero, as pages that take no memory and no time until they are written.

    They are mapped here: the heap, which the allocator settings let serve up to 32 MiB, writes zeros over what it has.
    From the size of a huge page on they begin with one: a page that began before would hold little else.

    Args:
        small: bytes at the beginning, a multiple of a huge page, that stay in usual pages, so that few numbers take
            little memory.
    """
    spare = HUGE_PAGE if num_bytes >= HUGE_PAGE else 0
    pages = mmap.mmap(-1, num_bytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE if spare else 0
    # A mapping begins with a page, and so does a huge page.
    first = start + small
    if hasattr(mmap, "MADV_HUGEPAGE") and first < len(pages):
        # Kernels without such pages refuse.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, first, len(pages) - first)
    return whole[start : start + num_bytes]


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


def expect(num_bytes: int) -> None:
    """Tell how many bytes of weights come next: few are written to usual pages, until more are expected."""
    _shared.expect(usual=num_bytes <= _FEW)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in huge pages whose numbers are written next; for what stays as long as its neighbours do."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    space = zeros(num_bytes) if num_bytes > OWN else _shared.take(num_bytes)
    return space.view(dtype).view(shape)


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in huge pages; see `empty`."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
