"""Asks the C library's allocator to keep freed memory, where it is glibc's.

A step on a CPU frees and takes buffers of some megabytes all the time. By default glibc gives such memory back to the
system at once, and each new buffer is then zeroed and mapped page by page: a tenth of the time of a prefill.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3), and values: buffers up to 32 MiB (the most glibc allows) come from the heap, which is given
# back only when 2 GiB at its end are free, and grows by 64 MiB.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_TOP_PAD, 64 << 20))


def keep_freed_memory() -> bool:
    """Apply the settings to this process; False if the C library has no such thing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(name, value) == 1 for name, value in _SETTINGS)
