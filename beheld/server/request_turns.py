"""Does one piece of requests' work in each turn of the event loop, and lets clients take turns."""

from __future__ import annotations

import asyncio
from collections import deque


class RequestTurns:
    """Begins one piece of work in each turn of the event loop; waiting clients take turns.

    Reading a request takes up to some milliseconds. If many arrived together, the loop would read all of them before it
    does anything else, and all of one client's before another client's that came later.
    """

    def __init__(self) -> None:
        self._taken = False
        # The client that was served last is the last.
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
