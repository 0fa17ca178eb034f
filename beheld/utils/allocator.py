"""The C library's allocator, where it is glibc's: asked to keep freed memory, or few arenas; and what it gave out.

A step on a CPU frees and takes buffers of some megabytes all the time. By default glibc gives such memory back to the
system at once, and each new buffer is then zeroed and mapped page by page: a tenth of the time of a prefill.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3), and values: buffers up to 32 MiB (the most glibc allows) come from the heap, which is given
# back only when 2 GiB at its end are free, and grows by 64 MiB.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_TOP_PAD, 64 << 20))
_M_ARENA_MAX = -8
_MAX_ARENAS = 2
_MEAN_OBJECT_BYTES = 64


def keep_freed_memory() -> bool:
    """Apply the settings to this process; False if the C library has no such thing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(name, value) == 1 for name, value in _SETTINGS)


def share_arenas() -> bool:
    """Let all threads of this process take memory from two arenas; False if the C library has no such thing.

    By default there are eight for each core, and threads that prepare pictures in turn leave holes in each of them
    around what is kept. Later calls change nothing for threads that have theirs, so it is for the start of a process.
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
    """What this process holds of its own memory: all that was taken from malloc and not freed, and Python's objects.

    Unlike what is resident it shows a leak at once, since memory that was freed is kept here and filled first. Python
    counts its small objects but not their bytes; they count as 64 each. None if the C library does not tell.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo.restype = _Counts
    counts = mallinfo()
    return int(counts.uordblks + counts.hblkhd) + _MEAN_OBJECT_BYTES * sys.getallocatedblocks()
