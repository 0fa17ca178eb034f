"""Prepares jobs ahead of the engine: in threads if there are spare cores, otherwise when they are taken.

The threads mostly wait for processes that decode and process media (inputs/media/workers.py). Jobs without such work
are prepared when taken: a crowd of threads would only keep the interpreter from the first step. Jobs keep their order.
A window limits the number of jobs prepared ahead, and another limit approximately the bytes of their features.

Jobs come from a user's iterable, which may be slow. A separate thread reads it, so that asking for ready jobs never
waits for it.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from beheld.api.collectors import PooledOutput
from beheld.core.outputs import PoolingRequestOutput
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.request import Request
from beheld.utils.gc_tuning import collecting
from beheld.utils.gil import take_turns
from beheld.utils.interrupts import uninterrupted
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Limit of the features that are ready and not taken, and also of those that are queued: about 400 images of 448 x 448
# pixels in bfloat16.
MAX_BYTES = 1 << 30

# Jobs read ahead if none is prepared ahead: enough to keep the reader ahead, and few, because they may hold raw images.
_UNPREPARED = 4

# How long `close` waits for a source that is producing its next item; it cannot be interrupted.
_PATIENCE_S = 1.0


@dataclass(frozen=True, eq=False)
class Job:
    """One prompt to be answered.

    Attributes:
        requests: PromptJobs._requests of this prompt: prepares it and returns one request per answer.
        light: preparing takes a fraction of a millisecond, all of it in the interpreter, so a thread would not help.
    """

    id: str
    params: SamplingParams | PoolingParams
    requests: Callable[[], list[Request]]
    tokenizer: Any
    light: bool = False


@dataclass(frozen=True, eq=False)
class JobGroup:
    """Prompts to be pooled, in a row, that are prepared together and at once: each would take microseconds alone.

    Attributes:
        ids: of each.
        params: of all.
        requests: PromptJobs._group_requests of these prompts: gives the request of each, or its error.
        kind: of the outputs.
    """

    ids: Sequence[str]
    params: PoolingParams
    requests: Callable[[], list[Request | Exception]]
    kind: type[PooledOutput] = PoolingRequestOutput
    light = True

    def __len__(self) -> int:
        return len(self.ids)


class Reading(Enum):
    """Which thread reads a source of jobs."""

    TAKER = "taker"  # the thread that takes the jobs: the next one is available at once
    THREAD = "thread"  # a separate thread, since the next one may take any time


@dataclass(frozen=True, eq=False)
class Jobs:
    """Jobs in order.

    Attributes:
        each: yields the jobs, and groups of them; only the thread that `reading` names runs it and closes it.
        total: number of jobs if known, for display; a group has as many as it has prompts.
    """

    each: Generator[Job | JobGroup, None, None]
    reading: Reading
    total: int | None = None


@dataclass(frozen=True, eq=False)
class Fed:
    """A job whose requests are ready, or that failed: `requests()` returns them or raises the error.

    Times are seconds of a monotonic clock. Of a group, `index` is that of its first prompt.
    """

    index: int
    job: Job | JobGroup
    made: list[Any]
    error: BaseException | None
    started: float
    prepared: float

    def requests(self) -> list[Any]:
        """The prepared requests; in a group, an error takes the place of a request that could not be prepared."""
        if self.error is None:
            return self.made
        try:
            raise self.error
        finally:
            # The error's traceback holds this frame, and would keep the job's media until garbage is collected.
            del self


@dataclass(eq=False)
class _Ahead:
    """A job that was read and not taken: its place, its requests or error, and when its preparation began and ended."""

    index: int
    job: Job | JobGroup
    made: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    times: list[float] = field(default_factory=list)
    done: bool = False


class Feed:
    """Gives prepared jobs in order.

    An error of the source ends it; `finish` raises the error after all earlier jobs were handled.

    Args:
        jobs: the source; one thread reads it, and only as far as the window reaches.
        threads: 0 prepares a job when it is taken, in the caller's thread.
        window: the most jobs that may be read, prepared or not, and not yet taken.
        max_bytes: the most bytes of features that may be ready and not yet taken. Jobs in preparation count with the
            mean of the earlier ones.
    """

    def __init__(self, jobs: Jobs, threads: int, window: int, max_bytes: int = MAX_BYTES) -> None:
        self._each = jobs.each
        self._pool: ThreadPoolExecutor | None = None
        if threads:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="beheld-prepare", initializer=take_turns)
        self._ahead: deque[_Ahead] = deque()
        self._max_bytes = max_bytes
        self._threads = threads
        # Guards all fields below; notified when there is room or a job to take.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._num_read = 0
        # Ready and not yet taken: jobs and bytes. Prepared so far: the same.
        self._ready = (0, 0)
        self._prepared = (0, 0)
        self._dry = False
        self._failure: BaseException | None = None
        self._reader: threading.Thread | None = None
        if jobs.reading is Reading.TAKER:
            self._window = window if threads else 1
        else:
            self._window = window if threads else min(window, _UNPREPARED)
            # A daemon, because a source may never return; in the caller's context, as if the caller read it.
            run = contextvars.copy_context().run
            self._reader = threading.Thread(target=run, args=(self._read,), name="beheld-read", daemon=True)
        # Not started here: a caller that is interrupted before it has this feed could not close it.
        self._begun = False

    @property
    def more(self) -> bool:
        """False once every job was taken and the source has ended; never waits."""
        self._look_ahead()
        with self._changed:
            return bool(self._ahead) or not self._dry

    def take(self, *, wait: bool) -> Fed | None:
        """The next job; None if there is none left.

        Args:
            wait: wait for a slow source and for preparing threads. Without it, the result is also None if the next job
                is not read or not ready; a job that its taker prepares is ready once it is read.
        """
        self._look_ahead()
        with self._changed:
            if wait:
                self._wait(lambda: bool(self._ahead) or self._dry)
            if not self._ahead:
                return None
            ahead = self._ahead[0]
        if self._pool is None or ahead.job.light:
            self._prepare(ahead)
        with self._changed:
            if wait:
                self._wait(lambda: ahead.done)
            elif not ahead.done:
                return None
        self._count_taken(ahead)
        return Fed(ahead.index, ahead.job, ahead.made, ahead.error, ahead.times[0], ahead.times[1])

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, with the lock held. The caller's own code makes the jobs meanwhile, or it decodes media."""
        if not ready():
            with collecting():
                self._changed.wait_for(ready)

    def finish(self) -> None:
        """Call this when there are no more jobs: raises the source's error, if it had one."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Drop the jobs that were not taken and end the reading; running preparations end in their own time.

        The thread that reads the source closes it. If it has waited too long for the next item, it closes the source
        after that item.
        """
        try:
            self._let_go()
            self._close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Release a lock that Ctrl-C left taken.

        It may interrupt between taking the lock and entering the block that releases it.

        Only the main thread gets Ctrl-C. Another thread may hold the lock rightly, and run garbage collection.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        with suppress(RuntimeError):
            while True:
                self._lock.release()

    def _close(self) -> None:
        with self._changed:
            self._dry = True
            self._ahead.clear()
            self._changed.notify_all()
        if self._pool is not None:
            # These take other locks, one of them process-wide.
            with uninterrupted():
                self._pool.shutdown(wait=False, cancel_futures=True)
        if self._reader is None or not self._begun:
            self._close_source()
        elif self._reader is not threading.current_thread():
            self._reader.join(_PATIENCE_S)
            if self._reader.is_alive():
                logger.info("The iterator of prompts is still producing its next item; it is closed after that.")

    def _read(self) -> None:
        """The reading thread: runs from the first job to the last, or until the feed is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dry or self._has_room())
                if self._dry:
                    break
            try:
                self._read_one()
            except BaseException as error:
                # Raised in this thread, the error would be lost.
                self._end(error)
        self._close_source()

    def _look_ahead(self) -> None:
        """Read as far as there is room, unless a thread reads, and start preparing."""
        if self._reader is not None and not self._begun:
            with uninterrupted():
                self._begun = True
                self._reader.start()
        while self._reader is None and not self._dry and self._has_room():
            self._read_one()

    def _read_one(self) -> None:
        try:
            job = next(self._each, None)
        except Exception as error:
            self._end(error)
            return
        if job is None:
            self._end(None)
            return
        with uninterrupted(), self._changed:
            if self._dry:
                return
            ahead = _Ahead(self._num_read, job)
            self._ahead.append(ahead)
            self._num_read += len(job) if isinstance(job, JobGroup) else 1
            if self._pool is not None and not job.light:
                self._pool.submit(self._prepare, ahead)
            self._changed.notify_all()

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            if not self._dry:
                self._failure = failure
            self._dry = True
            self._changed.notify_all()

    def _close_source(self) -> None:
        try:
            self._each.close()
        except Exception:
            logger.warning("The iterator of prompts failed when it was closed.", exc_info=True)

    def _has_room(self) -> bool:
        with self._changed:
            if not self._ahead:
                return True
            if len(self._ahead) >= self._window:
                return False
            if self._pool is None:
                return True
            ready, num_bytes = self._ready
            prepared, total = self._prepared
            in_work = len(self._ahead) - ready
        if not prepared:
            return in_work < 2 * self._threads
        return num_bytes + in_work * total / prepared < self._max_bytes

    def _count_prepared(self, ahead: _Ahead) -> None:
        num_bytes = _bytes_of(ahead)
        with self._changed:
            self._ready = (self._ready[0] + 1, self._ready[1] + num_bytes)
            self._prepared = (self._prepared[0] + 1, self._prepared[1] + num_bytes)
            ahead.done = True
            self._changed.notify_all()

    def _count_taken(self, ahead: _Ahead) -> None:
        num_bytes = _bytes_of(ahead)
        with self._changed:
            self._ahead.popleft()
            self._ready = (self._ready[0] - 1, self._ready[1] - num_bytes)
            self._changed.notify_all()

    def _prepare(self, ahead: _Ahead) -> None:
        """Prepare a job and record its result or error, with the times of start and end."""
        ahead.times.append(time.monotonic())
        try:
            ahead.made = ahead.job.requests()
        except BaseException as error:
            ahead.error = error
        ahead.times.append(time.monotonic())
        self._count_prepared(ahead)


def _bytes_of(ahead: _Ahead) -> int:
    return 0 if isinstance(ahead.job, JobGroup) else feature_bytes(ahead.made)


def feature_bytes(requests: list[Request]) -> int:
    """Bytes of the features of all items, each counted once: several answers to one prompt share them."""
    items = {id(span.item): span.item for request in requests if request.spans for span in request.spans}
    return sum(item.feature_bytes for item in items.values()) if items else 0
