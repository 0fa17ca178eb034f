"""Limits the bytes that threads hold at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from beheld.utils.cancellation import CancelToken


@dataclass(frozen=True, eq=False)
class _Ticket:
    client: str
    wanted: int


class MemoryGate:
    """Admits callers while there is room for their bytes; others wait.

    The client that holds the least comes first, and within a client the order is that of arrival. A named client that
    holds something leaves a quarter of all to clients that hold nothing.

    Args:
        max_bytes: a larger caller is admitted alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._rest = max_bytes // 4
        self._left = max_bytes
        self._held: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []

    @contextmanager
    def within(self, num_bytes: int, cancel: CancelToken, client: str = "") -> Iterator[None]:
        """Hold the bytes inside the block, after waiting for room.

        Raises:
            Cancelled: the request was cancelled while waiting.
        """
        ticket = _Ticket(client, min(num_bytes, self._max))
        with cancel.calling(self._wake), self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: cancel.cancelled or self._is_due(ticket))
                cancel.check()
                self._left -= ticket.wanted
                self._held[client] += ticket.wanted
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._left += ticket.wanted
                self._held[client] -= ticket.wanted
                if not self._held[client]:
                    del self._held[client]
                self._changed.notify_all()

    def _is_due(self, ticket: _Ticket) -> bool:
        if min(self._waiting, key=lambda other: self._held[other.client]) is not ticket:
            return False
        return ticket.wanted <= self._left - (self._rest if ticket.client and self._held[ticket.client] else 0)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
