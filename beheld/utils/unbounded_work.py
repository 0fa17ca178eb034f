"""Which threads do work that takes as long as it likes, such as code that a user wrote; another thread may ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_threads: set[int] = set()


@contextmanager
def running() -> Iterator[None]:
    """Within the block, this thread does such work, or waits for another that does."""
    thread = threading.get_ident()
    if thread in _threads:
        yield
        return
    _threads.add(thread)
    try:
        yield
    finally:
        _threads.discard(thread)


def runs(thread: int) -> bool:
    """Whether a thread does."""
    return thread in _threads
