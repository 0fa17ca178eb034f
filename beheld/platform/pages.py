"""Memory of the host in huge pages, for what is read from one end to the other again and again: weights and caches.

A processor asks its table of pages again for each 4 KiB otherwise, and fetches nothing ahead across the end of a page.
Caches begin in huge pages. Weights move there when the engine is ready, because a start would wait for such pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
# What is larger has a mapping of its own; less shares one with what comes after it. Pages take memory when written.
OWN, _SHARED = 16 << 20, 64 << 20
_LINE = 64
# Linux has MADV_COLLAPSE from 6.1 on. Other threads' page faults wait for a call.
_COLLAPSE, _AT_ONCE = 25, HUGE_PAGE
# The thread that moves weights has a third of another's share of a core.
_NICE = 5


# Mappings of weights that lie in usual pages yet.
_usual: list[weakref.ref[mmap.mmap]] = []


def zeros(num_bytes: int, small: int = 0) -> Tensor:
    """Return bytes, all zero, as pages that take no memory and no time until they are written.

    They are mapped here: the heap, which the allocator settings let serve up to 32 MiB, writes zeros over what it has.
    From the size of a huge page on they begin with one: a page that began before would hold little else.

    Args:
        small: so many bytes at the beginning, whole huge pages, stay in usual pages, so that a few take little memory.
    """
    pages, start = _mapped(num_bytes)
    # A mapping begins with a page, and so does a huge page.
    first = start + small
    if hasattr(mmap, "MADV_HUGEPAGE") and first < len(pages):
        # Kernels without such pages refuse.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, first, len(pages) - first)
    return torch.frombuffer(pages, dtype=torch.uint8)[start : start + num_bytes]


def _mapped(num_bytes: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where in it so many bytes begin with a huge page, if they are as many."""
    spare = HUGE_PAGE if num_bytes >= HUGE_PAGE else 0
    pages = mmap.mmap(-1, num_bytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return pages, -_address(pages) % HUGE_PAGE if spare else 0


def _address(pages: mmap.mmap) -> int:
    return torch.frombuffer(pages, dtype=torch.uint8).data_ptr()


def _for_weights(num_bytes: int) -> Tensor:
    """Bytes in usual pages, which `make_huge` replaces: to find huge ones takes a start half a second."""
    pages, start = _mapped(num_bytes)
    _usual.append(weakref.ref(pages))
    return torch.frombuffer(pages, dtype=torch.uint8)[start : start + num_bytes]


def make_huge() -> threading.Thread:
    """Move the weights so far to huge pages, in a thread; addresses and numbers stay. The caller need not wait."""
    _shared.end()
    mappings = [_usual.pop() for _ in range(len(_usual))]
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        mappings = []
    thread = threading.Thread(target=_make_huge, args=(mappings,), name="beheld-huge-pages", daemon=True)
    thread.start()
    return thread


def _make_huge(mappings: Sequence[weakref.ref[mmap.mmap]]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for reference in mappings:
        pages = reference()
        if pages is None:
            continue
        start, size = _address(pages), len(pages)
        first = start + -start % HUGE_PAGE
        for place in range(first, start + size - HUGE_PAGE + 1, _AT_ONCE):
            # It fails where nothing was written, no huge page is free, or Linux is older: the system may do it later.
            if advise(place, _AT_ONCE, _COLLAPSE) != 0:
                advise(place, _AT_ONCE, mmap.MADV_HUGEPAGE)
        del pages


class _Shared:
    """A mapping that tensors share, one after the other; it goes with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        with self._lock:
            if num_bytes > len(self._left):
                self._left = _for_weights(_SHARED)
            taken, self._left = self._left[:num_bytes], self._left[num_bytes + -num_bytes % _LINE :]
        return taken

    def end(self) -> None:
        """Let what comes next have a mapping of its own."""
        with self._lock:
            self._left = self._left[:0]


_shared = _Shared()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor for `make_huge` whose numbers are written next; for what stays as long as its neighbours do."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    space = _for_weights(num_bytes) if num_bytes > OWN else _shared.take(num_bytes)
    return space.view(dtype).view(shape)


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy; see `empty`."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
