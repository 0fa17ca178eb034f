"""Watches the processes of the other ranks: it reads what they send, and ends them all if one is gone or stuck."""

from __future__ import annotations

import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from beheld.cluster.remote import RemoteProcess
from beheld.core.errors import BeheldError, EngineDeadError
from beheld.executor.hangs import Hangs, Patience
from beheld.executor.progress import RankProgress, StepClock
from beheld.executor.wire import Beat, RankFailed, StepFailed
from beheld.parallel.group import RankGroups
from beheld.utils.log import get_logger
from beheld.wire.link import FrameError, Link
from beheld.wire.stream_link import StreamLink

logger = get_logger(__name__)

_RESTART = "Restart the engine."
_POLL_S = 0.25
# A process that sends no beat for so long is stopped or swapped out.
SILENT_S = 7.0
# What fails on all ranks fails at the same place on each; the others' messages come this much later at most.
_SAME_S = 2.0
# Failed steps that are remembered, more than are in flight at once.
_FAILED = 32
# If this process itself stood still for longer than this, what it did not hear says nothing.
_STALL_S = 2.0
# Ending what waits for ranks that are gone may itself wait for a device that stands still.
_ABORT_S = 2.0


@dataclass(eq=False)
class RankProcess:
    """The process of one rank, as the first rank sees it.

    Attributes:
        beat_at: when its last message came, by time.monotonic.
        progress: what its beats say.
        started: whether it has loaded its part.
        answers: its answers to requests, in order.
    """

    rank: int
    process: subprocess.Popen[bytes] | RemoteProcess
    link: Link | StreamLink
    beat_at: float = field(default_factory=time.monotonic)
    progress: RankProgress = field(init=False)
    started: bool = False
    answers: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.progress = RankProgress(self.rank)

    def ending(self) -> str:
        """How the process has ended, in words."""
        if isinstance(self.process, RemoteProcess):
            return f"on {self.process.host} is gone"
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with the code {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by the signal {-code}"


class Watchdog:
    """A thread that ends all ranks as soon as one of them cannot go on.

    What then waits for a rank fails at once, because its connections are closed. `cause` says why.

    Attributes:
        clock: of the first rank, which this process is.
        hangs: what finds a rank that hangs.
        factor: by which its limits of time are multiplied.
    """

    def __init__(self, ranks: Sequence[RankProcess], group: RankGroups, patience: Patience) -> None:
        self._ranks, self._group = ranks, group
        self.clock, self._own = StepClock(group), RankProgress(0)
        self.factor = patience.factor
        self.hangs = Hangs(self._own, [each.progress for each in ranks], patience, lockstep=group.lockstep)
        self._turn = threading.Lock()
        self._closing = False
        self._tell: Callable[[], None] | None = None
        self.cause: BeheldError | None = None
        # The last steps that failed on the first rank, and those that it has not begun while others may have.
        self._failed_here: tuple[int, ...] = ()
        self.not_begun: Collection[int] = ()
        self._failed_there: tuple[float, RankProcess, StepFailed] | None = None
        self._thread = threading.Thread(target=self._run, name="beheld-ranks", daemon=True)
        self._thread.start()

    def error(self) -> EngineDeadError:
        """Return the error of an engine whose ranks have ended."""
        cause = self.cause
        assert cause is not None
        return cause if isinstance(cause, EngineDeadError) else EngineDeadError(str(cause), _RESTART)

    def failed(self, step: int) -> None:
        """Note that a step has failed on the first rank."""
        self._failed_here = (*self._failed_here[-_FAILED:], step)

    def end(self, cause: BeheldError) -> None:
        """End all other ranks; the first cause counts."""
        with self._turn:
            if self.cause is not None or self._closing:
                return
            self.cause = cause
            tell = self._tell
        logger.error("%s", cause)
        self._kill()
        aborting = threading.Thread(target=self._group.abort, name="beheld-abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)
        if tell is not None:
            tell()

    def on_end(self, tell: Callable[[], None]) -> None:
        """Call `tell` once all ranks have ended with a cause, or now if they have."""
        with self._turn:
            self._tell = tell
            if self.cause is None:
                return
        tell()

    def _kill(self) -> None:
        for each in self._ranks:
            if each.process.poll() is None:
                each.process.kill()

    def leave(self) -> None:
        """Stop watching: this process ends, and the ranks with it."""
        with self._turn:
            self._closing = True

    def close(self, timeout_s: float) -> None:
        """Wait for the ranks to end by themselves, then end them."""
        self.leave()
        until = time.monotonic() + timeout_s
        for each in self._ranks:
            try:
                each.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s + 1.0)
        for each in self._ranks:
            each.link.close()

    def _run(self) -> None:
        waiting = select.poll()
        by_file = {each.link.fileno(): each for each in self._ranks}
        for file in by_file:
            waiting.register(file, select.POLLIN)
        looked = time.monotonic()
        while self.cause is None and not self._closing:
            for file, _ in waiting.poll(_POLL_S * 1000):
                self._read(by_file[file])
            now = time.monotonic()
            if now - looked > _STALL_S:
                self._own.excuse(now)
                for each in self._ranks:
                    each.beat_at = now
                    each.progress.excuse(now)
            looked = now
            if not self._closing:
                self._judge(now)

    def _read(self, rank: RankProcess) -> None:
        try:
            message = rank.link.receive()
        except (EOFError, OSError):
            if not self._closing:
                self.end(EngineDeadError(f"The process of rank {rank.rank} {rank.ending()}.", _RESTART))
            return
        except FrameError:
            self.end(EngineDeadError(f"A message of rank {rank.rank} cannot be read.", _RESTART))
            return
        rank.beat_at = time.monotonic()
        if isinstance(message, Beat):
            rank.progress.note(message, rank.beat_at)
        elif isinstance(message, StepFailed):
            self._failed_there = rank.beat_at, rank, message
        elif isinstance(message, RankFailed):
            self.end(_of_rank(rank.rank, message.error))
        else:
            rank.answers.put(message)

    def _judge(self, now: float) -> None:
        failed = self._failed_there
        if failed is not None:
            at, where, message = failed
            if message.id in self._failed_here:
                self._failed_there = None
            elif message.id in self.not_begun:
                self._failed_there = now, where, message
            elif now - at > _SAME_S * self.factor:
                self.end(EngineDeadError(f"A step failed on rank {where.rank} alone ({message.reason}).", _RESTART))
        for each in self._ranks:
            if each.started and now - each.beat_at > SILENT_S * self.factor:
                self.end(EngineDeadError(f"The process of rank {each.rank} does not answer.", _RESTART))
        if all(each.started for each in self._ranks):
            self._own.note(self.clock.beat(), now)
            hang = self.hangs.found(now)
            if hang is not None:
                self.end(EngineDeadError(hang, _RESTART))


def _of_rank(rank: int, error: BeheldError) -> BeheldError:
    """Return an error that names the rank, of the same type."""
    reason, remedy, *_ = error.arguments()
    return type(error)(f"Rank {rank}: {reason}", remedy)
