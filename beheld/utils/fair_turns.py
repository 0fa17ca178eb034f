"""Limits simultaneous work in the event loop, in all and for each client."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager


class FairTurns:
    """A number of simultaneous turns, of which each client has at most its part; waiting clients take turns.

    Args:
        most: turns in all.
        most_per_client: turns of one client.
    """

    def __init__(self, most: int, most_per_client: int) -> None:
        self._left = most
        self._most_per_client = most_per_client
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def idle(self) -> bool:
        """No turn is taken or waited for."""
        return not self._held and not self._waiting

    async def take(self, client: str) -> Callable[[], None]:
        """Wait for a turn; returns the function that ends it, to be called once, in the event loop."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        self._wake()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._leave(client, granted)
            else:
                # It was granted, and is not wanted any more.
                self._end(client)
            raise
        return lambda: self._end(client)

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncGenerator[None, None]:
        """Wait for a turn, and have it inside the block."""
        end = await self.take(client)
        try:
            yield
        finally:
            end()

    def _leave(self, client: str, granted: asyncio.Future[None]) -> None:
        line = self._waiting.get(client)
        if line is not None and granted in line:
            line.remove(granted)
            if not line:
                del self._waiting[client]

    def _end(self, client: str) -> None:
        self._left += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._wake()

    def _wake(self) -> None:
        while self._left:
            client = next((client for client in self._waiting if self._held[client] < self._most_per_client), None)
            if client is None:
                return
            line = self._waiting.pop(client)
            granted = line.popleft()
            if line:
                # Behind the others that wait.
                self._waiting[client] = line
            if not granted.cancelled():
                self._left -= 1
                self._held[client] += 1
                granted.set_result(None)
