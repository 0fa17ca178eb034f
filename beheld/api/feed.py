"""Prepares jobs ahead of the engine: in threads where there are cores to spare, else when they are asked for.

The threads mostly wait for processes that decode and process media (inputs/workers.py). Jobs that need neither are
prepared when they are asked for: a crowd of threads would only keep the interpreter from the first step. The order of
the jobs is kept, and no more is prepared ahead than a window of jobs, nor much more than a bound on the bytes of their
features.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from beheld.core.params import SamplingParams
from beheld.core.request import Request

# Some 400 pictures of 448 x 448 pixels in bfloat16.
MAX_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class Job:
    """One prompt to be answered: `requests()` prepares it and gives one request per answer wanted.

    Attributes:
        light: it is prepared in a fraction of a millisecond, all of it in the interpreter: no thread would help.
    """

    id: str
    params: SamplingParams
    requests: Callable[[], list[Request]]
    tokenizer: Any
    light: bool = False


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
        max_bytes: of features that may be ready and not yet taken. What jobs in work will bring is taken to be the mean
            of those before them.
    """

    def __init__(self, jobs: Iterator[Job], threads: int, window: int, max_bytes: int = MAX_BYTES) -> None:
        self._source = enumerate(jobs)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="beheld-prepare") if threads else None
        self._window = window if threads else 1
        self._ahead: deque[tuple[int, Job, Future[list[Request]], list[float]]] = deque()
        self._max_bytes = max_bytes
        self._threads = threads
        self._counting = threading.Lock()
        # Ready and not yet taken: jobs, and bytes. Prepared so far: the same.
        self._ready = (0, 0)
        self._prepared = (0, 0)
        self._dry = False

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
        if self._pool is None or job.light:
            self._prepare(job, future, times)
        elif not future.done() and not wait:
            return None
        self._ahead.popleft()
        self._count_taken(future)
        return Fed(index, job, future, times[0], times[1])

    def close(self) -> None:
        """Drop what was not taken; jobs being prepared end in their own time."""
        self._dry = True
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _look_ahead(self) -> None:
        while not self._dry and (not self._ahead or self._has_room()):
            entry = next(self._source, None)
            if entry is None:
                self._dry = True
                return
            index, job = entry
            future: Future[list[Request]] = Future()
            times: list[float] = []
            self._ahead.append((index, job, future, times))
            if self._pool is not None and not job.light:
                self._pool.submit(self._prepare, job, future, times)

    def _has_room(self) -> bool:
        if len(self._ahead) >= self._window:
            return False
        with self._counting:
            ready, num_bytes = self._ready
            prepared, total = self._prepared
        in_work = len(self._ahead) - ready
        if not prepared:
            return in_work < 2 * self._threads
        return num_bytes + in_work * total / prepared < self._max_bytes

    def _count_prepared(self, requests: list[Request]) -> None:
        num_bytes = _feature_bytes(requests)
        with self._counting:
            self._ready = (self._ready[0] + 1, self._ready[1] + num_bytes)
            self._prepared = (self._prepared[0] + 1, self._prepared[1] + num_bytes)

    def _count_taken(self, future: Future[list[Request]]) -> None:
        num_bytes = 0 if future.exception() is not None else _feature_bytes(future.result())
        with self._counting:
            self._ready = (self._ready[0] - 1, self._ready[1] - num_bytes)

    def _prepare(self, job: Job, future: Future[list[Request]], times: list[float]) -> None:
        """Run a job's preparation and keep what it gives or raises, with the times of its start and end."""
        times.append(time.monotonic())
        try:
            requests = job.requests()
        except BaseException as error:
            times.append(time.monotonic())
            self._count_prepared([])
            future.set_exception(error)
        else:
            times.append(time.monotonic())
            self._count_prepared(requests)
            future.set_result(requests)


def _feature_bytes(requests: list[Request]) -> int:
    """Bytes of the features of all items, each counted once; several answers to one prompt share theirs."""
    items = {id(span.item): span.item for request in requests for span in request.spans}
    return sum(item.feature_bytes for item in items.values())
