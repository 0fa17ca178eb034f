"""Which threads run code that a user wrote, which may take as long as it likes; another thread may ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_threads: set[int] = set()


@contextmanager
def running() -> Iterator[None]:
    """Within the block, this thread runs such code."""
    thread = threading.get_ident()
    _threads.add(thread)
    try:
        yield
    finally:
        _threads.discard(thread)


def runs(thread: int) -> bool:
    """Whether a thread does."""
    return thread in _threads
