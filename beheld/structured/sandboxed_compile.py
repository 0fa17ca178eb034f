"""Grammars are first compiled where that can be killed: what passes there in time may be compiled beside the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from beheld.core.errors import ParamsError, WorkerError
from beheld.core.params import Grammar
from beheld.sandbox.pool import Fault, PoolSettings, WorkerFault, WorkerPool
from beheld.structured.tasks import CODEC, Settings
from beheld.utils import env
from beheld.utils.cancellation import Departure
from beheld.utils.lru import LRU

_MAX_BYTES = 1 << 30
# Remembered grammars that passed: each weighs its text and something for the entry.
_PASSED_BYTES = 16 << 20
_ENTRY_BYTES = 256


class Rehearsal:
    """Compiles grammars in processes of their own. Safe to use from several threads.

    Args:
        count: processes; they begin with the first grammar.
        settings: gives the tokenizer; called once.
    """

    def __init__(self, count: int, settings: Callable[[], Settings]) -> None:
        self._count = count
        self._settings = settings
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._closed = False
        self._passed: LRU[Grammar, bool] = LRU(_PASSED_BYTES)

    def run(self, grammar: Grammar, departure: Departure | None = None) -> None:
        """Compile it there, unless it has passed before.

        Raises:
            ParamsError: it is not a valid one, or compiling it takes too long or too much memory.
            WorkerError: the process ended.
            Departed: whoever asked has left; a process that was at it is gone.
        """
        if self._passed.get(grammar):
            return
        seconds = env.GRAMMAR_TIMEOUT()
        try:
            self._living().run(grammar, seconds, departure)
        except WorkerFault as fault:
            if fault.fault is Fault.TIME:
                raise _refusal(f"compiling it takes more than {seconds:g} s") from fault
            # The library ends its process where it gets no memory.
            if fault.fault is Fault.MEMORY or "SIGABRT" in fault.how:
                raise _refusal("compiling it takes too much memory") from fault
            raise WorkerError(
                f"The process that compiled the grammar ended ({fault.how}).", "Send it again."
            ) from fault
        self._passed.put(grammar, True, _ENTRY_BYTES + len(grammar.text))

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of the processes."""
        return () if self._pool is None else self._pool.pids()

    def close(self) -> None:
        """End them."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.close()

    def _living(self) -> WorkerPool:
        with self._lock:
            if self._closed:
                raise WorkerError("The engine was closed.")
            if self._pool is None:
                settings = PoolSettings("beheld.structured.tasks", self._settings(), CODEC, _MAX_BYTES)
                self._pool = WorkerPool(settings, self._count)
            return self._pool


def _refusal(reason: str) -> ParamsError:
    return ParamsError(
        f"The grammar cannot be used: {reason}.", "Make it simpler or smaller.", param="structured_outputs"
    )
