"""Who prepares requests makes way for the thread that drives the device, where both share one interpreter.

Launching a step calls the library some hundred times, and each call gives the interpreter away and wants it back:
beside threads that keep it busy a launch takes many times as long, and the device waits. Those threads have time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Bounds how long preparing stands still should a launch hang.
_MOST_S = 0.1

_clear = threading.Event()
_clear.set()


@contextmanager
def driving() -> Iterator[None]:
    """Within the block, threads that ask in `give_way` wait. Two engines in one process may cut each other's short."""
    _clear.clear()
    try:
        yield
    finally:
        _clear.set()


def give_way() -> None:
    """To be called before a piece of work that holds the interpreter for some tenths of a millisecond or more."""
    if not _clear.is_set():
        _clear.wait(_MOST_S)
