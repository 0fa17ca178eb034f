"""Where items are opened and processed: in the caller's process, or in workers that can be killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from beheld.core.config import EngineArgs, EngineConfig, MediaLimits, MediaWork, ModelInfo
from beheld.core.errors import BeheldError, LimitError, WorkerError
from beheld.inputs.media.cache import Content
from beheld.inputs.media.open_media import Source, open_source
from beheld.inputs.media.tasks import CODEC, Made, Make, Open, Opened, Settings
from beheld.inputs.prompt.tokenizer import for_workers
from beheld.sandbox.pool import Fault, PoolSettings, WorkerFault, WorkerPool
from beheld.utils.cancellation import Departure
from beheld.utils.gil import take_turns

A = TypeVar("A")
B = TypeVar("B")


class Workers:
    """Workers of one input pipeline. Safe to use from several threads.

    Nothing is begun before the first item, except where the workers process too: loading a processor takes seconds, and
    the model's loading takes longer.

    Args:
        count: processes; 0 opens and processes in the caller's own, where nothing that runs away can be stopped.
        work: what they do.
        settings: what they need to know.
    """

    def __init__(self, count: int, work: MediaWork, settings: Settings) -> None:
        assert count >= 0
        self._limits = settings.limits
        self._pool: WorkerPool | None = None
        if count:
            pool = PoolSettings("beheld.inputs.media.tasks", settings, CODEC, settings.limits.max_work_bytes)
            self._pool = WorkerPool(pool, count)
        self.process_too = count > 0 and work is MediaWork.PROCESS
        # They only wait, each for one worker.
        self._threads: ThreadPoolExecutor | None = None
        if count > 1:
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="beheld-media", initializer=take_turns)
        if self._pool is not None and self.process_too:
            self._pool.warm()

    @classmethod
    def of(cls, info: ModelInfo, config: EngineConfig, args: EngineArgs) -> Workers:
        """The workers that were decided on."""
        limits = MediaLimits.of(args.media_limits)
        if config.media_work is not MediaWork.PROCESS or not info.modalities:
            return cls(config.media_workers, MediaWork.DECODE, Settings(limits))
        told = for_workers(info, args)
        return cls(config.media_workers, config.media_work, Settings(limits, info, told, config.dtype))

    def map(self, function: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """`function` of each item, in order. When all have ended, the first failure in that order is raised."""
        if self._threads is None or len(items) < 2:
            return [function(item) for item in items]
        futures = [self._threads.submit(function, item) for item in items]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def open(
        self, modality: str, source: Source, rate: Callable[[], int], departure: Departure | None = None
    ) -> tuple[Any, Content]:
        """As opening.open_source; bytes are opened by a worker.

        Raises:
            DecodeError, LimitError: the content is at fault; also if opening it takes too long or too much memory.
            WorkerError: the worker ended.
            Departed: whoever asked has left; a worker that was at it is gone.
        """
        if self._pool is None or not isinstance(source.payload, bytes):
            return open_source(modality, source, self._limits, rate)
        task = Open(modality, source, rate() if modality == "audio" else 0)
        answer = self._run(modality, task, departure)
        if not isinstance(answer, Opened):
            raise WorkerError(f"A worker answered with a {type(answer).__name__}.")
        return answer.opened, answer.content

    def make(self, task: Make, rate: Callable[[], int], departure: Departure | None = None) -> Made:
        """Open and process a source, both by a worker; only bytes are opened there.

        Raises:
            MediaError, ParamsError: the content or an option is at fault.
            WorkerError: the worker ended.
            Departed: as `open`.
        """
        source = task.source
        if not isinstance(source.payload, bytes):
            opened, content = open_source(task.modality, source, self._limits, rate)
            task = replace(task, source=Source(source.kind, source.digest, opened, content=content))
        answer = self._run(task.modality, task, departure)
        if not isinstance(answer, Made):
            raise WorkerError(f"A worker answered with a {type(answer).__name__}.")
        return answer

    def close(self) -> None:
        """End them."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of the worker processes."""
        return () if self._pool is None else self._pool.pids()

    def _run(self, modality: str, task: Open | Make, departure: Departure | None = None) -> Any:
        assert self._pool is not None
        seconds = self._limits.work_timeout_s[modality]
        try:
            return self._pool.run(task, seconds, departure)
        except WorkerFault as fault:
            raise _told(fault, modality, seconds) from fault


def _told(fault: WorkerFault, modality: str, seconds: float) -> BeheldError:
    if fault.fault is Fault.TIME:
        return LimitError(f"Preparing the {modality} took more than {seconds:g} s.", "Send a smaller one.")
    if fault.fault is Fault.MEMORY:
        return LimitError(f"Preparing the {modality} took more memory than is allowed.", "Send a smaller one.")
    return WorkerError(f"The process that prepared the {modality} ended ({fault.how}).", "Send it again.")
