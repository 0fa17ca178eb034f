"""Limits the bytes that threads hold at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from beheld.utils.cancellation import CancelToken


class MemoryGate:
    """Admits callers while there is room for their bytes; others wait in order of arrival.

    Args:
        max_bytes: a larger caller is admitted alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._left = max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def within(self, num_bytes: int, cancel: CancelToken) -> Iterator[None]:
        """Hold the bytes inside the block, after waiting for room.

        Raises:
            Cancelled: the request was cancelled while waiting.
        """
        wanted, ticket = min(num_bytes, self._max), object()

        def free() -> bool:
            return cancel.cancelled or (self._waiting[0] is ticket and wanted <= self._left)

        with cancel.calling(self._wake), self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(free)
                cancel.check()
                self._left -= wanted
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._left += wanted
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
