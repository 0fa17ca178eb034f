"""A time limit for receiving that data extends as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

# Bytes that earn one second: an eighth of a poor mobile connection's rate.
MIN_RATE = 16 << 10


class Pace:
    """The deadline of one sender; made by `paced`.

    Args:
        deadline: the timeout to move.
        first_s, most_s: see `paced`.
    """

    def __init__(self, deadline: asyncio.Timeout, first_s: float, most_s: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._deadline = deadline
        self._first_s = first_s
        self._until = self._now() + first_s
        self._last = self._now() + most_s

    def received(self, num_bytes: int) -> None:
        """Record the arrival of `num_bytes`."""
        self._until = min(self._until + num_bytes / MIN_RATE, self._now() + self._first_s)
        self._deadline.reschedule(min(self._until, self._last))

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Exclude the block from the sender's time: it counts only towards `most_s`."""
        begin = self._now()
        self._deadline.reschedule(self._last)
        yield
        self._until += self._now() - begin
        self.received(0)


@asynccontextmanager
async def paced(first_s: float, most_s: float) -> AsyncGenerator[Pace, None]:
    """A time limit for receiving: `first_s` seconds, plus one second for every MIN_RATE bytes that arrive.

    The remaining time never exceeds `first_s`, so a sender cannot save up a long silence. The limit ends after `most_s`
    in any case.

    Raises:
        TimeoutError: the time is over.
    """
    async with asyncio.timeout(min(first_s, most_s)) as deadline:
        yield Pace(deadline, first_s, most_s)
