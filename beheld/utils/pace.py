"""How long somebody may take to send something: a while in which nothing need come, and more as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

# Bytes that lengthen the time by a second: an eighth of what a poor mobile connection carries.
MIN_RATE = 16 << 10


class Pace:
    """The deadline of one sender; made by `paced`.

    Args:
        deadline: what ends it.
        begin: of the event loop's clock.
        first_s, most_s: see `paced`.
    """

    def __init__(self, deadline: asyncio.Timeout, begin: float, first_s: float, most_s: float) -> None:
        self._deadline = deadline
        self._begin = begin
        self._first_s = first_s
        self._most_s = most_s
        self._came = 0

    def came(self, num_bytes: int) -> None:
        """So many bytes more have come."""
        self._came += num_bytes
        self._set(self._first_s + self._came / MIN_RATE)

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """What passes inside the block is not the sender's doing: it counts as part of `most_s` alone."""
        now = asyncio.get_running_loop().time
        begin = now()
        self._set(self._most_s)
        yield
        self._first_s += now() - begin
        self.came(0)

    def _set(self, seconds: float) -> None:
        self._deadline.reschedule(self._begin + min(seconds, self._most_s))


@asynccontextmanager
async def paced(first_s: float, most_s: float) -> AsyncGenerator[Pace, None]:
    """A time limit for receiving: `first_s` seconds and one more for every MIN_RATE bytes, at most `most_s` in all.

    Raises:
        TimeoutError: it is over.
    """
    begin = asyncio.get_running_loop().time()
    async with asyncio.timeout_at(begin + min(first_s, most_s)) as deadline:
        yield Pace(deadline, begin, first_s, most_s)
