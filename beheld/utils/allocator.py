"""Settings of glibc's allocator: how much freed memory it keeps, how many arenas it has, and how much is in use.

A step on a CPU constantly frees and allocates buffers of several megabytes. By default glibc returns such memory to the
system at once, and the kernel zeroes and maps each new buffer page by page, which takes a tenth of a prefill's time.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

# Parameters and values of mallopt(3). Buffers up to 32 MiB (glibc's maximum) come from the heap. The heap grows by 64
# MiB, or by less if less may be kept, and shrinks only when more than 2 GiB at its end are free.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_THRESHOLD, _TOP_PAD, _MOST_KEPT = 32 << 20, 64 << 20, (1 << 31) - 1
_M_ARENA_MAX = -8
_MAX_ARENAS = 2
_MEAN_OBJECT_BYTES = 64


def keep_freed_memory(most_bytes: int = _MOST_KEPT) -> bool:
    """Let this process keep up to `most_bytes` of freed memory; False if the C library does not support it."""
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
    """Let all threads of this process share two arenas; False if the C library does not support it.

    The default is eight arenas per core, and threads that take turns preparing images leave holes in each. A thread
    that has an arena keeps it, so call this when the process starts.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS) == 1)
    except (OSError, AttributeError):
        return False


def give_back_freed() -> None:
    """Return to the system the freed memory that `keep_freed_memory` keeps; other threads go on meanwhile."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_COUNTS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Counts(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3)."""

    # uordblks: bytes of the heap in use; hblkhd: bytes of separately mapped blocks.
    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS]


def held_bytes() -> int | None:
    """Bytes in use by this process: malloc's allocations and Python's small objects.

    This shows a leak at once. Resident memory does not, because the allocator keeps and reuses freed memory. Python
    counts its small objects but not their bytes, so each counts as 64. None if the C library has no such counter.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo.restype = _Counts
    counts = mallinfo()
    return int(counts.uordblks + counts.hblkhd) + _MEAN_OBJECT_BYTES * sys.getallocatedblocks()
