"""Since when each thread of this process waits for its device; another thread may ask.

A thread that waits there says nothing, however long the device takes or whether it stands still.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_since: dict[int, float] = {}


@contextmanager
def waiting() -> Iterator[None]:
    """Within the block, this thread waits for its device."""
    thread = threading.get_ident()
    _since[thread] = time.monotonic()
    try:
        yield
    finally:
        del _since[thread]


def waits_since(thread: int) -> float | None:
    """Since when a thread waits, by time.monotonic; None if it does not."""
    return _since.get(thread)
