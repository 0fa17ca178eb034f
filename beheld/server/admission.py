"""Admission control: counts running requests and the bytes of their bodies, and refuses more than the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from beheld.server import limits
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions


class AdmissionControl:
    """Limits the running requests and drains them before the end.

    Attributes:
        num_connections: returns the number of connections; the server sets it.
        draining: the server is about to end.
        cut: the server ends now and cancels running requests.
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
        """Register the current task, which answers a request, so that `cut_off` cancels it."""
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        self._tasks.add(task)
        try:
            yield task
        finally:
            self._tasks.discard(task)

    def cut_off(self) -> None:
        """Cancel all running requests; `CutOff` answers their clients."""
        self.cut = True
        for task in self._tasks:
            task.cancel()

    @property
    def busy(self) -> int:
        """Number of running answers."""
        return self._busy

    @contextmanager
    def admitted(self, answers: int = 1) -> Iterator[None]:
        """Reserve `answers` running answers.

        Raises:
            HttpError: 503 with Retry-After, at once, if there are too many or the server is about to end.
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
        """Raise what `admitted` would, so that a full server need not read a body that it will refuse."""
        if self.draining:
            raise HttpError(
                503,
                "The server is shutting down.",
                "Try again after the restart.",
                code="draining",
                headers={"Retry-After": "30"},
            )
        if self._busy + answers > self._max and self._busy:
            raise _busy("The server has too many running requests.")

    def crowded(self) -> bool:
        """True if there are more connections than the limit."""
        return self.num_connections() > self._max_connections

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies that are being read or prepared."""
        return self._held

    def hold(self) -> Hold:
        """Reserve the bytes of one body until it is released."""
        return Hold(self)

    def hold_columns(self, num_bytes: int, param: str = "prompt_logprobs") -> Hold:
        """Reserve the bytes of log-probabilities of prompts, and of many of an answer, until they are released.

        Args:
            num_bytes: the most that there may be.
            param: the field that asks for them.

        Raises:
            HttpError: 400 if they alone are too many; 503 if they are together with all bodies.
        """
        if num_bytes > self._max_held:
            raise HttpError(
                400,
                f"The log-probabilities that {param} asks for take up to {num_bytes >> 20} MiB; "
                f"the server holds at most {self._max_held >> 20} MiB.",
                "Ask for fewer candidates, fewer or shorter answers (max_tokens), or send fewer prompts at once.",
                param=param,
            )
        held = self.hold()
        held.grow(num_bytes)
        return held

    def take(self, num_bytes: int) -> None:
        """Count bytes of a body.

        Raises:
            HttpError: 503 with Retry-After if all bodies together are too large.
        """
        if self._held + num_bytes > self._max_held:
            raise _busy("The server has too many large requests.")
        self._held += num_bytes

    def give(self, num_bytes: int) -> None:
        """Stop counting bytes that were taken."""
        self._held -= num_bytes

    async def idle(self) -> None:
        """Wait until no request is running."""
        await self._idle.wait()


class Hold:
    """The bytes of one body, as a context or until `release`.

    The first bytes are not counted, so that large bodies never keep small ones out.
    """

    def __init__(self, admission: AdmissionControl) -> None:
        self._admission = admission
        self._size = 0
        self.counted = 0

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop counting the body; a second call does nothing."""
        self._admission.give(self.counted)
        self.counted = 0

    def shrink(self, num_bytes: int) -> None:
        """Count `num_bytes` in all, which is less than before; after `release` nothing changes."""
        self._size = num_bytes
        less = self.counted - max(0, num_bytes - limits.FREE_BYTES)
        if less > 0:
            self._admission.give(less)
            self.counted -= less

    def grow(self, num_bytes: int) -> None:
        """Count `num_bytes` more.

        Raises:
            HttpError: 503 if all bodies together are too large.
        """
        self._size += num_bytes
        more = max(0, self._size - limits.FREE_BYTES) - self.counted
        if more > 0:
            self._admission.take(more)
            self.counted += more


def _busy(reason: str) -> HttpError:
    return HttpError(503, reason, "Try again.", code="busy", headers={"Retry-After": "1"})
