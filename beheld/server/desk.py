"""The desk: how many requests are in work, whether more are taken, and what the server counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions


class Desk:
    """Admission, bounded; and the drain before the end."""

    def __init__(self, options: ServerOptions) -> None:
        self._max = options.max_requests
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def busy(self) -> int:
        """Answers in work."""
        return self._busy

    @contextmanager
    def admitted(self, answers: int = 1) -> Iterator[None]:
        """The right to have `answers` answers in work.

        Raises:
            HttpError: 503 with Retry-After, at once, when there are too many or the server is about to end.
        """
        if self.draining:
            raise HttpError(503, "The server is shutting down.", code="draining", headers={"Retry-After": "30"})
        if self._busy + answers > self._max and self._busy:
            raise HttpError(
                503,
                "The server has too many requests in work.",
                "Try again.",
                code="busy",
                headers={"Retry-After": "1"},
            )
        self._busy += answers
        self._idle.clear()
        try:
            yield
        finally:
            self._busy -= answers
            if not self._busy:
                self._idle.set()

    async def idle(self) -> None:
        """Return once nothing is in work."""
        await self._idle.wait()
