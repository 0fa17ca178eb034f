"""Work of the host that keeps the interpreter busy: while several clients ask, one piece at a time, with rests.

A thread that drives the device or the event loop takes the interpreter again after each of hundreds of calls, and each
time waits for every other thread that computes: with four of them a step of 20 ms takes 140. A single call of C code,
such as json.loads, keeps the interpreter for up to 25 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

from beheld.utils.fair_turns import FairTurns

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Work up to so many seconds needs no rest after it; and the longest rest.
_QUICK_S = 0.005
_LONGEST_REST_S = 0.05
# A client counts as one of several for so many seconds after its last request began.
_RECENT_S = 0.25


class HostTurns:
    """Runs long pieces of work in threads. While one client asks, nothing of it waits.

    While others ask, one piece runs at a time, and after a long one nothing for as long as it took. All methods but
    those that run in threads are called in the event loop.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._one = FairTurns(1, 1)
        self._until = 0.0
        # Clients whose requests are in work.
        self._asking: Counter[str] = Counter()
        # The client whose request began last and the last other one, and when.
        self._last, self._before = ("", float("-inf")), ("", float("-inf"))

    def seen(self, client: str) -> None:
        """A request of this client begins."""
        if client != self._last[0]:
            self._before = self._last
        self._last = client, self._clock()

    @contextmanager
    def asking(self, client: str) -> Iterator[None]:
        """A request of this client is in work inside the block."""
        self.seen(client)
        self._asking[client] += 1
        try:
            yield
        finally:
            self._asking[client] -= 1
            if not self._asking[client]:
                del self._asking[client]

    @property
    def num_asking(self) -> int:
        """How many requests are in work."""
        return sum(self._asking.values())

    def others_ask(self, client: str) -> bool:
        """True if a request of another client is in work, or began a moment ago."""
        if len(self._asking) > (client in self._asking):
            return True
        other, when = self._last if self._last[0] != client else self._before
        return other != client and self._clock() - when < _RECENT_S

    async def run(self, executor: Executor, client: str, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Return what the function returns in a thread of the executor, after the turn and the rest that are due."""
        loop = asyncio.get_running_loop()
        if not self.others_ask(client):
            return await loop.run_in_executor(executor, self._timed, function, *arguments)
        async with self._one.turn(client):
            rest = self._until - self._clock()
            if rest > 0 and self.others_ask(client):
                await asyncio.sleep(rest)
            return await loop.run_in_executor(executor, self._timed, function, *arguments)

    def _timed(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        begin = time.thread_time()
        try:
            return function(*arguments)
        finally:
            took = time.thread_time() - begin
            if took > _QUICK_S:
                self._until = self._clock() + min(took, _LONGEST_REST_S)
