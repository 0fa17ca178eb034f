"""The cancel token, by which threads learn that the result they work or wait for is no longer wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancelled(BaseException):
    """The result is no longer wanted. No Exception, so that nothing takes it for an error of the work."""


class CancelToken:
    """Is cancelled at most once, and never taken back. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: dict[object, Callable[[], None]] = {}

    @property
    def cancelled(self) -> bool:
        """True once it was cancelled."""
        return self._cancelled

    def check(self) -> None:
        """Raise Cancelled once it was cancelled."""
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
        """Have `callback` called if the token is cancelled within the block, and never after it.

        `callback` must neither wait nor fail. Enter the block without any lock that `callback` takes.

        Raises:
            Cancelled: the token was cancelled before.
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
