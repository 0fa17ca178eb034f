"""How much memory this process holds, and the most that it held meanwhile."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


def resident_bytes() -> int:
    """What is resident of this process, which is that of servers in its threads as well."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most bytes that are resident within, beyond those before: the system's mark, which is set back first."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before, above = resident_bytes(), [0]
    yield above
    with open("/proc/self/status", encoding="ascii") as file:
        most = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    above[0] = most - before


@contextmanager
def peak_of_objects() -> Iterator[list[int]]:
    """The most bytes that Python's objects take within, beyond those before; exact, and slow where there are many."""
    above = [0]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield above
        above[0] = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
