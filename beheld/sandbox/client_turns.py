"""Turns at a group of workers, so that one client's tasks do not keep another's waiting."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from beheld.core.errors import WorkerError
from beheld.utils.cancellation import CancelToken

# One turn more than usual is given to a client that has none, once all turns have been held for so long.
PATIENCE_S = 1.0


@dataclass(eq=False)
class ClientTurn:
    """A turn of a client: waited for, then held."""

    client: str
    begun: float = field(default=0.0)


class ClientTurns:
    """A number of turns; clients that wait are served by turns, first who holds fewest. Thread-safe.

    Work that has begun is not interrupted. So if tasks of other clients are long, a client that holds no turn gets one
    in addition: there is at most one such turn at a time.

    Args:
        most: turns at a time.
        patience_s: how long turns are held before there is one more.
    """

    def __init__(self, most: int, patience_s: float = PATIENCE_S) -> None:
        assert most > 0
        self._most = most
        self._patience_s = patience_s
        self._changed = threading.Condition()
        # The client that was served last stands last.
        self._waiting: dict[str, deque[ClientTurn]] = {}
        self._held: set[ClientTurn] = set()
        self._closed = False

    def take(self, client: str, cancel: CancelToken) -> ClientTurn:
        """Wait for a turn; the caller gives it back.

        Raises:
            WorkerError: there are no more turns.
            Cancelled: it is not wanted any more.
        """
        turn = ClientTurn(client)
        with cancel.calling(self._wake), self._changed:
            self._waiting.setdefault(client, deque()).append(turn)
            try:
                while not self._closed and not self._is_due(turn):
                    self._changed.wait(self._patience_s if self._held else None)
                    cancel.check()
                if self._closed:
                    raise WorkerError("The engine is closed.")
                turn.begun = time.monotonic()
                self._held.add(turn)
            finally:
                self._leave(turn)
        return turn

    def give_back(self, turn: ClientTurn) -> None:
        """End a turn."""
        with self._changed:
            self._held.discard(turn)
            self._changed.notify_all()

    def close(self) -> None:
        """Give no more turns; those that wait get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_due(self, turn: ClientTurn) -> bool:
        held = [other.client for other in self._held]
        first = min(self._waiting, key=held.count)
        if self._waiting[first][0] is not turn:
            return False
        if len(held) < self._most:
            return True
        patient_until = time.monotonic() - self._patience_s
        return (
            len(held) == self._most
            and turn.client not in held
            and all(other.begun <= patient_until for other in self._held)
        )

    def _leave(self, turn: ClientTurn) -> None:
        line = self._waiting.pop(turn.client)
        line.remove(turn)
        if line:
            self._waiting[turn.client] = line
        # Another turn may be due now.
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
