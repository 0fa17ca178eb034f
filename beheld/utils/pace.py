"""How long somebody may take to send something: no longer than a while if it does not come, and more as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

# Bytes that give a second: an eighth of what a poor mobile connection carries.
MIN_RATE = 16 << 10


class Pace:
    """The deadline of one sender; made by `paced`.

    Args:
        deadline: what ends it.
        first_s, most_s: see `paced`.
    """

    def __init__(self, deadline: asyncio.Timeout, first_s: float, most_s: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._deadline = deadline
        self._first_s = first_s
        self._until = self._now() + first_s
        self._last = self._now() + most_s

    def came(self, num_bytes: int) -> None:
        """So many bytes more have come."""
        self._until = min(self._until + num_bytes / MIN_RATE, self._now() + self._first_s)
        self._deadline.reschedule(min(self._until, self._last))

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """What passes inside the block is not the sender's doing: it counts as part of `most_s` alone."""
        begin = self._now()
        self._deadline.reschedule(self._last)
        yield
        self._until += self._now() - begin
        self.came(0)


@asynccontextmanager
async def paced(first_s: float, most_s: float) -> AsyncGenerator[Pace, None]:
    """A time limit for receiving: `first_s` seconds, to which every MIN_RATE bytes that come add one. Never are more
    than `first_s` left, so nobody earns a long silence; and it ends after `most_s`.

    Raises:
        TimeoutError: it is over.
    """
    async with asyncio.timeout(min(first_s, most_s)) as deadline:
        yield Pace(deadline, first_s, most_s)
