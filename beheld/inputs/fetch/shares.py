"""What fetches share with each other, so that one client's leave enough for everybody else's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from beheld.utils.loop_share import LoopShare


async def _at_once(num_bytes: int) -> None:
    """There is room."""


async def _unbounded() -> Callable[[], None]:
    """There is a turn."""
    return lambda: None


@dataclass(frozen=True)
class Shares:
    """One fetch's part in what all share; the default is that of a fetch which is alone.

    Attributes:
        reserve: waits until there is room for so many bytes more; the waiting counts as time.
        parsing: turns at parsing what comes in tiny pieces.
        resolving: waits for a turn at the resolver, and gives what ends that turn.
    """

    reserve: Callable[[int], Awaitable[None]] = _at_once
    parsing: LoopShare = field(default_factory=LoopShare)
    resolving: Callable[[], Awaitable[Callable[[], None]]] = _unbounded


class Room:
    """Bytes that may be held at a time; callers that want more wait, first come, first served.

    What comes is held until its request is prepared, and takes room as it comes. So that requests which each hold a
    part do not wait for each other, the one that began first may have all that is left; the others leave it a rest.

    Args:
        max_bytes: a caller that wants more than all of it gets all of it.
        rest_bytes: what all but the first request leave.
    """

    def __init__(self, max_bytes: int, rest_bytes: int = 0) -> None:
        self._max = max_bytes
        self._rest = min(rest_bytes, max_bytes // 2)
        self._left = max_bytes
        self._requests: dict[object, None] = {}
        self._waiting: deque[tuple[int, object, asyncio.Future[None]]] = deque()

    @contextmanager
    def request(self) -> Generator[Callable[[int], Awaitable[None]], None, None]:
        """A request, which comes after those that began before: what takes room for it until the block ends."""
        taken: list[int] = []
        request = object()

        async def reserve(num_bytes: int) -> None:
            taken.append(await self.take(num_bytes, request))

        self._requests[request] = None
        try:
            yield reserve
        finally:
            del self._requests[request]
            self.give(sum(taken))

    async def take(self, num_bytes: int, request: object = None) -> int:
        """Wait for room; what is to be given back."""
        wanted = min(num_bytes, self._max)
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, request, granted))
        self._wake()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                # It was granted, and is not wanted any more.
                self.give(wanted)
            self._wake()
            raise
        return wanted

    def give(self, num_bytes: int) -> None:
        """Give back what was taken."""
        self._left += num_bytes
        self._wake()

    def _wake(self) -> None:
        first = next(iter(self._requests), None)
        waiting, self._waiting = self._waiting, deque()
        passed = False
        for wanted, request, granted in waiting:
            if granted.cancelled():
                continue
            is_first = request is not None and request is first
            if wanted <= self._left - (0 if is_first else self._rest) and (is_first or not passed):
                self._left -= wanted
                granted.set_result(None)
            else:
                self._waiting.append((wanted, request, granted))
                passed = passed or not is_first
