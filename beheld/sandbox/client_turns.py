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
    """A turn of a client: waited for, then held.

    Attributes:
        changed: its own, so that a change wakes the one thread that it concerns.
    """

    client: str
    changed: threading.Condition
    begun: float = field(default=0.0)


class ClientTurns:
    """A number of turns; of the waiting clients, the one that holds the fewest is next. Thread-safe.

    Work that has begun is not interrupted. So while other clients' tasks are long, one client that holds no turn gets
    an additional one.

    Args:
        most: turns at a time.
        patience_s: how long turns are held before there is one more.
    """

    def __init__(self, most: int, patience_s: float = PATIENCE_S) -> None:
        assert most > 0
        self._most = most
        self._patience_s = patience_s
        # Reentrant: a finalizer or a signal may close or cancel in the thread that holds it.
        self._lock = threading.RLock()
        # The client that was served last is the last.
        self._waiting: dict[str, deque[ClientTurn]] = {}
        self._held: set[ClientTurn] = set()
        self._closed = False

    def take(self, client: str, cancel: CancelToken) -> ClientTurn:
        """Wait for a turn; the caller gives it back.

        Raises:
            WorkerError: there are no more turns.
            Cancelled: it is not wanted any more.
        """
        turn = ClientTurn(client, threading.Condition(self._lock))

        def wake() -> None:
            with self._lock:
                turn.changed.notify()

        with cancel.calling(wake), self._lock:
            self._waiting.setdefault(client, deque()).append(turn)
            try:
                while not self._closed and not self._is_due(turn):
                    turn.changed.wait(self._patience_s)
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
        with self._lock:
            self._held.discard(turn)
            self._wake_next()

    def close(self) -> None:
        """Give no more turns; those that wait get an error."""
        with self._lock:
            self._closed = True
            for line in self._waiting.values():
                for turn in line:
                    turn.changed.notify()

    def _next(self) -> ClientTurn:
        """The turn before which no other is due."""
        held = [other.client for other in self._held]
        return self._waiting[min(self._waiting, key=held.count)][0]

    def _is_due(self, turn: ClientTurn) -> bool:
        if turn is not self._next():
            return False
        held = [other.client for other in self._held]
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
        self._wake_next()

    def _wake_next(self) -> None:
        """Wake the turn that is due, if any. If all woke, each task would switch between all threads."""
        if self._waiting and self._is_due(turn := self._next()):
            turn.changed.notify()
