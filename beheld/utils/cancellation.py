"""The cancel token: it notifies threads that a result is no longer wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancelled(BaseException):
    """The result is no longer wanted. Not an Exception, so that error handling does not catch it."""


class CancelToken:
    """A flag that is set at most once and never reset. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: dict[object, Callable[[], None]] = {}

    @property
    def cancelled(self) -> bool:
        """True after `cancel`."""
        return self._cancelled

    def check(self) -> None:
        """Raise Cancelled after `cancel`."""
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Cancel the work, and call every callback."""
        with self._lock:
            self._cancelled = True
            for callback in self._callbacks.values():
                callback()

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` if the token is cancelled inside the block; never call it after the block.

        `callback` must not wait or fail. Do not hold a lock that `callback` takes when entering the block.

        Raises:
            Cancelled: the token is already cancelled.
        """
        key = object()
        with self._lock:
            self.check()
            self._callbacks[key] = callback
        try:
            yield
        finally:
            with self._lock:
                del self._callbacks[key]
