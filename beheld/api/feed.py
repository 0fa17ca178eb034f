"""Prepares jobs ahead of the engine: in threads where there are cores to spare, else when they are asked for.

Preparing a picture (decoding, resizing, hashing) leaves the interpreter to others for most of its time, so threads keep
a GPU fed; the order of the jobs is kept, and no more than a window of them is prepared ahead.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from beheld.core.params import SamplingParams
from beheld.core.request import Request

_SWITCH_S = 2e-4


@dataclass(frozen=True, eq=False)
class Job:
    """One prompt to be answered: `requests()` prepares it and gives one request per answer wanted."""

    id: str
    params: SamplingParams
    requests: Callable[[], list[Request]]
    tokenizer: Any


@dataclass(frozen=True, eq=False)
class Fed:
    """A job whose requests are ready, or that failed: `requests()` gives them or raises what went wrong.

    Times are seconds of a monotonic clock.
    """

    index: int
    job: Job
    future: Future[list[Request]]
    started: float
    prepared: float

    def requests(self) -> list[Request]:
        """The prepared requests."""
        return self.future.result()


class Feed:
    """Gives prepared jobs in their order.

    Args:
        jobs: read only as far as the window reaches.
        threads: 0 prepares a job when it is taken, in the caller's thread.
        window: how many jobs may be prepared and not yet taken.
    """

    def __init__(self, jobs: Iterator[Job], threads: int, window: int) -> None:
        self._source = enumerate(jobs)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="beheld-prepare") if threads else None
        self._window = window if threads else 1
        self._ahead: deque[tuple[int, Job, Future[list[Request]], list[float]]] = deque()
        self._dry = False
        self._interval = sys.getswitchinterval()
        if threads:
            # The thread that drives the device gives the interpreter away with every operation, and must not wait the
            # usual five milliseconds to get it back from those that prepare.
            sys.setswitchinterval(_SWITCH_S)

    @property
    def more(self) -> bool:
        """False once every job was taken."""
        self._look_ahead()
        return bool(self._ahead)

    def take(self, *, wait: bool) -> Fed | None:
        """The next job; None if there is none, or if it is not ready and `wait` is False."""
        self._look_ahead()
        if not self._ahead:
            return None
        index, job, future, times = self._ahead[0]
        if self._pool is None:
            _prepare(job, future, times)
        elif not future.done() and not wait:
            return None
        self._ahead.popleft()
        future.exception()
        return Fed(index, job, future, times[0], times[1])

    def close(self) -> None:
        """Drop what was not taken; jobs being prepared end in their own time."""
        self._dry = True
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            sys.setswitchinterval(self._interval)

    def _look_ahead(self) -> None:
        while not self._dry and len(self._ahead) < self._window:
            entry = next(self._source, None)
            if entry is None:
                self._dry = True
                return
            index, job = entry
            future: Future[list[Request]] = Future()
            times: list[float] = []
            self._ahead.append((index, job, future, times))
            if self._pool is not None:
                self._pool.submit(_prepare, job, future, times)


def _prepare(job: Job, future: Future[list[Request]], times: list[float]) -> None:
    """Run a job's preparation and keep what it gives or raises, with the times of its start and end."""
    times.append(time.monotonic())
    try:
        requests = job.requests()
    except BaseException as error:
        times.append(time.monotonic())
        future.set_exception(error)
    else:
        times.append(time.monotonic())
        future.set_result(requests)
