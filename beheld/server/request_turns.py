"""Requests' work in pieces: one in each turn of the event loop, or one at a time in threads, with rests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Work up to so many seconds needs no rest after it; and the longest rest.
_QUICK_S = 0.005
_LONGEST_REST_S = 0.05


class RequestTurns:
    """Begins one piece of work in each turn of the event loop; clients that wait are served by turns.

    To read a request takes up to some milliseconds. Of many that arrive together the loop would read all before it
    looks at anything else, and all of one client before one of another that came later.
    """

    def __init__(self) -> None:
        self._taken = False
        # The client that was served last stands last.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, client: str) -> None:
        """Wait for a turn, which lasts until the caller waits for something else."""
        if not self._taken:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        await granted

    def _next(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            granted = line.popleft()
            if line:
                self._waiting[client] = line
            if not granted.cancelled():
                granted.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False


class Rests:
    """Runs one piece of threads' work at a time, and after a long one nothing for as long as it took.

    A single call of C code, such as json.loads, keeps the interpreter for up to 25 ms. The event loop needs it some
    tens of times for one request, and would wait for another such call each time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0

    def run(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Return what the function returns, after the rest that is due."""
        with self._lock:
            time.sleep(max(0.0, self._until - time.monotonic()))
            begin = time.thread_time()
            try:
                return function(*arguments)
            finally:
                took = time.thread_time() - begin
                if took > _QUICK_S:
                    self._until = time.monotonic() + min(took, _LONGEST_REST_S)
