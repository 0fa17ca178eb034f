"""Admission: how many requests are in work, what their bodies hold, and whether more are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from beheld.server import limits
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions


class Admission:
    """Admission, bounded; and the drain before the end.

    Attributes:
        num_connections: tells how many there are; whoever listens puts it here.
        draining: the server is about to end.
        cut: it ends now, with what is in work.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._max = options.max_requests
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._max_held = options.max_reading_bytes
        self._held = 0
        self._max_connections = options.max_connections
        self.num_connections: Callable[[], int] = lambda: 0
        self.draining = False
        self.cut = False
        self._tasks: set[asyncio.Task[object]] = set()

    @contextmanager
    def known(self) -> Iterator[asyncio.Task[object]]:
        """This task answers a request, which `cut_off` cancels."""
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        self._tasks.add(task)
        try:
            yield task
        finally:
            self._tasks.discard(task)

    def cut_off(self) -> None:
        """End all that is in work; see `CutOff`, which tells the clients."""
        self.cut = True
        for task in self._tasks:
            task.cancel()

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
        self.check(answers)
        self._busy += answers
        self._idle.clear()
        try:
            yield
        finally:
            self._busy -= answers
            if not self._busy:
                self._idle.set()

    def check(self, answers: int = 1) -> None:
        """Raise what `admitted` would: so a server that is full need not read what it will not answer."""
        if self.draining:
            raise HttpError(
                503,
                "The server is shutting down.",
                "Ask again when it has started anew.",
                code="draining",
                headers={"Retry-After": "30"},
            )
        if self._busy + answers > self._max and self._busy:
            raise _busy("The server has too many requests in work.")

    def crowded(self) -> bool:
        """Whether there are more connections than are served."""
        return self.num_connections() > self._max_connections

    @property
    def held_bytes(self) -> int:
        """What bodies hold that are being read or prepared."""
        return self._held

    def hold(self) -> Hold:
        """The right to keep the bytes of one body, until it is released."""
        return Hold(self)

    def take(self, num_bytes: int) -> None:
        """Count bytes that a body holds.

        Raises:
            HttpError: 503 with Retry-After when bodies hold too much in all.
        """
        if self._held + num_bytes > self._max_held:
            raise _busy("The server has too many large requests in work.")
        self._held += num_bytes

    def give(self, num_bytes: int) -> None:
        """Bytes that were taken are held no more."""
        self._held -= num_bytes

    async def idle(self) -> None:
        """Return once nothing is in work."""
        await self._idle.wait()


class Hold:
    """What one body holds, as a context or until `release`; its first bytes are free, so that small bodies are never
    kept out by large ones."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size = 0
        self.counted = 0

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """The body is gone; a second time says nothing new."""
        self._admission.give(self.counted)
        self.counted = 0

    def grow(self, num_bytes: int) -> None:
        """So many bytes came.

        Raises:
            HttpError: 503 when bodies hold too much in all.
        """
        self._size += num_bytes
        more = max(0, self._size - limits.FREE_BYTES) - self.counted
        if more > 0:
            self._admission.take(more)
            self.counted += more


def _busy(reason: str) -> HttpError:
    return HttpError(503, reason, "Try again.", code="busy", headers={"Retry-After": "1"})
