"""Whether whoever asked for something has gone away, for threads that work or wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Departed(BaseException):
    """Nobody waits for the result any more. No Exception, so that nothing takes it for an error of the work."""


class Departure:
    """The leaving of one who asked, which happens at most once. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone = False
        self._told: dict[object, Callable[[], None]] = {}

    @property
    def gone(self) -> bool:
        """True once they have left."""
        return self._gone

    def check(self) -> None:
        """Raise Departed once they have left."""
        if self._gone:
            raise Departed

    def leave(self) -> None:
        """They have left: tell all who want to be told."""
        with self._lock:
            self._gone = True
            for tell in self._told.values():
                tell()

    @contextmanager
    def told(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have `tell` called if they leave within the block, and never behind it.

        `tell` must neither wait nor fail. Whoever enters the block must hold nothing that `tell` takes.

        Raises:
            Departed: they had left before.
        """
        key = object()
        with self._lock:
            self.check()
            self._told[key] = tell
        try:
            yield
        finally:
            with self._lock:
                del self._told[key]
