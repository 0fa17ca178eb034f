"""glibc's allocator: how much freed memory it keeps, how many arenas it has, and how much it has given out.

A step on a CPU frees and takes buffers of some megabytes all the time. By default glibc gives such memory back to the
system at once, and each new buffer is then zeroed and mapped page by page: a tenth of the time of a prefill.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3), and values: buffers up to 32 MiB (the most glibc allows) come from the heap, which grows by
# 64 MiB and is given back only when more than 2 GiB at its end are free. Where less is to be kept, it grows by less.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_THRESHOLD, _TOP_PAD, _MOST_KEPT = 32 << 20, 64 << 20, (1 << 31) - 1
_M_ARENA_MAX = -8
_MAX_ARENAS = 2
_MEAN_OBJECT_BYTES = 64


def keep_freed_memory(most_bytes: int = _MOST_KEPT) -> bool:
    """Let this process keep up to `most_bytes` of freed memory; False if the C library cannot."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, most_bytes),
        (_M_TOP_PAD, min(_TOP_PAD, most_bytes // 4)),
    )
    return all(mallopt(name, value) == 1 for name, value in settings)


def share_arenas() -> bool:
    """Let all threads of this process share two arenas; False if the C library cannot.

    By default there are eight for each core, and threads that prepare images one after another leave holes in each of
    them. Threads that already have an arena keep it, so call this when a process starts.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS) == 1)
    except (OSError, AttributeError):
        return False


_COUNTS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Counts(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3)."""

    # uordblks: bytes of the heap that are in use; hblkhd: bytes of blocks that are mapped by themselves.
    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS]


def held_bytes() -> int | None:
    """Bytes that this process holds: all that malloc gave out and did not get back, and Python's small objects.

    It shows a leak at once, which resident memory does not: freed memory is kept and filled again first. Python counts
    its small objects but not their bytes, so each counts as 64. None if the C library has no such counter.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo.restype = _Counts
    counts = mallinfo()
    return int(counts.uordblks + counts.hblkhd) + _MEAN_OBJECT_BYTES * sys.getallocatedblocks()
