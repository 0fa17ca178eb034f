"""A buffer of what arrives in one turn of the event loop, such as the texts of one request to /v1/embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TurnBuffer(Generic[T]):
    """Hands on together what was added in one turn of the running event loop, in order.

    Args:
        hand_on: called in the next turn, or by `flush`; it raises nothing.
    """

    def __init__(self, hand_on: Callable[[list[T]], object]) -> None:
        self._hand_on = hand_on
        self._entries: list[T] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, entry: T) -> None:
        """Add an entry."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # What a loop that has ended left is nobody's any more.
            self._loop, self._entries = loop, []
        if not self._entries:
            loop.call_soon(self.flush)
        self._entries.append(entry)

    def flush(self) -> None:
        """Hand on what is there."""
        entries, self._entries = self._entries, []
        if entries:
            self._hand_on(entries)
