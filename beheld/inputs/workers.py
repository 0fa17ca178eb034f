"""Where the preparation of several items happens: one after the other, or in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Workers:
    """Maps a function over items, in order.

    Threads are enough here: decoding, resizing, hashing and waiting for a server all leave the interpreter to others.

    Args:
        count: threads; 0 means the caller's own.
    """

    def __init__(self, count: int) -> None:
        assert count >= 0
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="beheld-media") if count else None

    def map(self, function: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """`function` of each item, in order. When all have ended, the first failure in that order is raised."""
        if self._pool is None or len(items) < 2:
            return [function(item) for item in items]
        futures = [self._pool.submit(function, item) for item in items]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
