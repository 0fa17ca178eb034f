"""One offline run: jobs in, outputs out, with the device waiting for media as little as possible."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from beheld.api.collectors import Output, PooledOutput, RequestCollector, collector_of, failed, pooled
from beheld.api.feed import MAX_BYTES, Fed, Feed, Job, JobGroup, Jobs, Reading, feature_bytes
from beheld.api.offline_engine import OfflineEngine, OwnEngine
from beheld.core.config import EngineConfig
from beheld.core.errors import AsleepError, BeheldError, EngineDeadError, EngineError, ParamsError
from beheld.core.outputs import RequestOutput, TokenEvent, metrics_of
from beheld.core.params import SamplingParams
from beheld.core.request import FinishReason, Request
from beheld.engine.core import EngineCore
from beheld.utils.gc_tuning import collect_if_due, uncollected
from beheld.utils.gil import quick_turns
from beheld.utils.interrupts import uninterrupted
from beheld.utils.log import at_terminal

# How long the first step waits for one more job. Several steps of few rows take longer than one of many, and the
# preparing threads wait for the interpreter while they are launched. On an H200, 256 known images, 7B: 180 requests/s
# against 172, and none of six runs at 157.
_LULL_S = 0.002
# The most such waiting in total; 256 known images use half of it.
_MOST_LULLS_S = 0.25


@dataclass(eq=False)
class _LiveJob:
    index: int
    collector: RequestCollector
    started: float
    prepared: float
    first_token: float | None = None
    waited_s: float = 0.0


@dataclass(slots=True, eq=False)
class _LivePrompt:
    """A prompt of a group that is being pooled: its one event is its end."""

    index: int
    request: Request
    kind: type[PooledOutput]
    started: float
    prepared: float


class Bars:
    """The two progress bars of vLLM, or none."""

    def __init__(self, total: int | None, progress: bool | Callable[..., Any]) -> None:
        self._adding: Any = None
        self._answering: Any = None
        self._tokens_in = 0
        self._tokens_out = 0
        # Finished since the bar was drawn last.
        self._num_finished = 0
        self._started = time.monotonic()
        if progress:
            from tqdm import tqdm

            make = tqdm if progress is True else progress
            # The second bar stands below the first by codes that move a terminal's cursor; a file has none.
            place = {"position": 0} if progress is True and not at_terminal() else {}
            self._adding = make(total=total, desc="Adding requests", dynamic_ncols=True, **place)
            self._answering = make(
                total=total,
                desc="Processed prompts",
                dynamic_ncols=True,
                **place,
                postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
            )

    def added(self, count: int = 1) -> None:
        """Count queued jobs."""
        if self._adding is not None:
            self._adding.update(count)

    def finished(self, output: Output) -> None:
        """Count a finished job; `show` draws it."""
        if self._answering is None:
            return
        self._num_finished += 1
        usage = output.usage
        self._tokens_in += usage.prompt_tokens
        self._tokens_out += usage.completion_tokens

    def show(self) -> None:
        """Draw what has finished."""
        if self._answering is None or not self._num_finished:
            return
        seconds = max(1e-9, time.monotonic() - self._started)
        self._answering.postfix = (
            f"est. speed input: {self._tokens_in / seconds:.2f} toks/s, output: {self._tokens_out / seconds:.2f} toks/s"
        )
        count, self._num_finished = self._num_finished, 0
        self._answering.update(count)

    def close(self) -> None:
        """Stop the bars as they are."""
        self.show()
        for bar in (self._adding, self._answering):
            if bar is not None:
                bar.close()


@dataclass(eq=False)
class OfflineRun:
    """Feeds jobs to an engine and collects their outputs."""

    engine: OfflineEngine
    config: EngineConfig
    _live: dict[str, _LiveJob] = field(default_factory=dict)
    _prompts: dict[str, _LivePrompt] = field(default_factory=dict)
    # Queued jobs without a first token: index -> bytes of their features.
    _unheard: dict[int, int] = field(default_factory=dict)
    _busy: bool = False

    @property
    def core(self) -> EngineCore:
        """The engine's core, if it is in this process."""
        assert isinstance(self.engine, OwnEngine), "the engines are in processes"
        return self.engine.core

    def sleep(self, level: int) -> None:
        """Let the engine sleep, see EngineCore.sleep.

        Raises:
            EngineError: a run has not ended.
            ConfigError: the engine cannot.
        """
        if self._busy:
            raise EngineError("This LLM is busy with another run.", "Finish or close that iterator first.")
        self.engine.sleep(level)

    def results(
        self,
        jobs: Jobs,
        on_error: str,
        *,
        progress: bool | Callable[..., Any] = False,
    ) -> Iterator[tuple[int, Output]]:
        """Yield (index of the job, its output) as each job finishes.

        Jobs are prepared a little ahead of the engine, never all at once, so that their media do not fill the memory.
        While there is something to compute, nothing waits for a job that is not ready.

        Raises:
            UserError, EngineError: the first job's error, unless `on_error` is "return".
            Exception: the source's error, after the outputs of all earlier jobs.
        """
        if on_error not in ("raise", "return"):
            raise ParamsError(f"on_error must be 'raise' or 'return', got {on_error!r}.", param="on_error")
        bars = Bars(jobs.total, progress)
        try:
            for index, output, _ in self._progress(jobs, on_error, bars, at_end=True):
                if output is not None:
                    yield index, output
        finally:
            bars.close()

    def stream(self, job: Job) -> Iterator[Output]:
        """Yield the new part of one job's output after every step; the last one is finished.

        Raises:
            UserError, EngineError: the job's error.
        """
        alone = Jobs((one for one in (job,)), Reading.TAKER, 1)
        for _, _, live in self._progress(alone, "raise", Bars(None, False), at_end=False):
            if live is not None:
                yield live.collector.delta()

    def _progress(
        self, jobs: Jobs, on_error: str, bars: Bars, *, at_end: bool
    ) -> Iterator[tuple[int, Output | None, _LiveJob | None]]:
        """The loop: add jobs, step, and yield (index, output of a complete job, live job) after each event.

        A prompt of a group is no live job.

        Args:
            at_end: the caller reads no output before its job is complete.
        """
        if self._busy:
            raise EngineError("This LLM is busy with another run.", "Finish or close that iterator first.")
        if self.engine.lacks:
            raise AsleepError("This LLM sleeps.", "Call wake_up() first.")
        in_flight: Any = None
        feed = Feed(jobs, self.config.prepare_threads, 2 * self.config.max_num_seqs)
        self._busy = True
        try:
            while feed.more or in_flight is not None or self.engine.has_work:
                collect_if_due()
                # The preparing threads need the interpreter as well.
                with quick_turns(), uncollected():
                    failures = self._fill(
                        feed, bars, on_error, idle=in_flight is None, reading=jobs.reading, at_end=at_end
                    )
                for index, early in failures:
                    yield index, early, None
                with uninterrupted(), uncollected():
                    in_flight, events = self._step(in_flight, on_error)
                    of_runs = self._pooled(events)
                for event in events:
                    live, pooled_one = None, of_runs.get(event.request_id)
                    if pooled_one is not None:
                        index, output = pooled_one
                    elif (live := self._live.get(event.request_id)) is not None:
                        index, output = live.index, self._push(event, live)
                    else:
                        continue
                    if output is not None:
                        bars.finished(output)
                        if output.error is not None and on_error == "raise":
                            raise output.error
                    yield index, output, live
                bars.show()
            feed.finish()
        finally:
            try:
                feed.close()
            finally:
                try:
                    with uninterrupted():
                        self._drop(in_flight)
                finally:
                    self._busy = False

    def _step(self, in_flight: Any, on_error: str) -> tuple[Any, list[TokenEvent]]:
        """The engine's step; with `on_error="return"`, a dead engine gives every request an error."""
        try:
            return self.engine.step(in_flight)
        except EngineDeadError as error:
            if on_error == "raise":
                raise
            names = [*self._live, *self._prompts]
            for name in names:
                self.engine.abort(name)
            return None, [TokenEvent(name, (), FinishReason.ERROR, error=error) for name in names]

    def _pooled(self, events: Sequence[TokenEvent]) -> dict[str, tuple[int, Output]]:
        """The index and the output of each prompt of a group that one of these events ends, by its id."""
        found: dict[str, tuple[int, Output]] = {}
        if not self._prompts:
            return found
        now = time.monotonic()
        for event in events:
            prompt = self._prompts.pop(event.request_id, None)
            if prompt is None:
                continue
            output = pooled(event.request_id, prompt.request, event, prompt.kind)
            # The event is the first and the last.
            milliseconds = 1e3 * (now - prompt.started)
            output.milliseconds = {
                "prepare": 1e3 * (prompt.prepared - prompt.started),
                "first_token": milliseconds,
                "total": milliseconds,
            }
            found[event.request_id] = prompt.index, output
        return found

    def _fill(
        self, feed: Feed, bars: Bars, on_error: str, *, idle: bool, reading: Reading, at_end: bool
    ) -> list[tuple[int, Output]]:
        """Queue the ready jobs, and wait for one if nothing else is to do; returns the jobs that failed at once.

        Args:
            idle: the device has no work. Its first step then starts as soon as enough is queued, or nothing arrives for
                a moment. Otherwise only jobs prepared in this thread are limited, because they delay the next step.
            reading: which thread reads the jobs. A list surely has more; for other iterables the first job does not
                wait.
            at_end: see `_progress`.
        """
        failures: list[tuple[int, Output]] = []
        tokens, light = 0, 0
        first = idle and reading is Reading.TAKER and not self.engine.has_work
        until: float | None = None
        while self.engine.num_waiting + len(failures) < self.config.max_num_seqs:
            if (tokens if idle else light) >= self.config.max_num_batched_tokens:
                break
            # A queue's length does not limit its size: 256 videos may exceed the host's memory.
            if sum(self._unheard.values()) >= MAX_BYTES:
                break
            # Nor while a failure is still to be returned.
            fed = feed.take(wait=idle and not self.engine.has_work and not failures)
            if fed is None and first and feed.more:
                until = until or time.monotonic() + _MOST_LULLS_S
                if time.monotonic() < until:
                    time.sleep(_LULL_S)
                    fed = feed.take(wait=False)
            if fed is None:
                break
            if isinstance(fed.job, JobGroup):
                with uninterrupted():
                    failed_ones, requests = self._add_group(fed, fed.job, on_error)
                bars.added(len(fed.job))
            else:
                with uninterrupted():
                    early = self._add(fed, fed.job, on_error, at_end=at_end)
                bars.added()
                failed_ones = [] if early is None else [(fed.index, early)]
                requests = fed.requests() if early is None else []
            for _, output in failed_ones:
                bars.finished(output)
            failures += failed_ones
            tokens += sum(self.engine.num_unseen(request) for request in requests) if idle else 0
            light += sum(len(request.token_ids) for request in requests) if fed.job.light else 0
        bars.show()
        return failures

    def _add_group(self, fed: Fed, group: JobGroup, on_error: str) -> tuple[list[tuple[int, Output]], list[Request]]:
        """Queue a group; returns outputs of what could not be prepared or queued, and the requests of the others."""
        made = fed.requests()
        errors = {name: one for name, one in zip(group.ids, made, strict=True) if isinstance(one, Exception)}
        if errors and on_error == "raise":
            raise next(iter(errors.values()))
        requests: list[Request] = [one for one in made if not isinstance(one, Exception)] if errors else made
        try:
            refused = self.engine.add_many(requests)
        except Exception as error:
            refused = {request.id: error for request in requests}
        errors |= refused
        for index, (name, request) in enumerate(zip(group.ids, made, strict=True), fed.index):
            if name not in errors:
                self._prompts[name] = _LivePrompt(index, request, group.kind, fed.started, fed.prepared)
        if refused:
            requests = [request for request in requests if request.id not in refused]
            if on_error == "raise":
                raise next(iter(refused.values()))
        failures = [
            (fed.index + place, failed(name, group.params, _as_beheld_error(errors[name]), group.kind))
            for place, name in enumerate(group.ids)
            if name in errors
        ]
        return failures, requests

    def _add(self, fed: Fed, job: Job, on_error: str, *, at_end: bool) -> Output | None:
        """Queue a job; returns its output if it could not be prepared or queued.

        Args:
            at_end: see `_progress`.
        """
        added: list[str] = []
        try:
            requests = fed.requests()
            live = _LiveJob(
                fed.index, collector_of(job.id, job.params, requests, job.tokenizer), fed.started, fed.prepared
            )
            # Of vectors, the first event is the end.
            restartable = at_end and isinstance(job.params, SamplingParams)
            for request in requests:
                self.engine.add(replace(request, restartable=True) if restartable else request)
                added.append(request.id)
                self._live[request.id] = live
            if num_bytes := feature_bytes(requests):
                self._unheard[live.index] = num_bytes
        except Exception as error:
            for request_id in added:
                self._forget(request_id)
            if on_error == "raise":
                raise
            return failed(job.id, job.params, _as_beheld_error(error))
        return None

    def _push(self, event: TokenEvent, live: _LiveJob) -> Output | None:
        """Pass an event to its collector; returns the output if the job is complete."""
        if live.first_token is None:
            live.first_token, live.waited_s = time.monotonic(), event.waited_s
            self._unheard.pop(live.index, None)
        if live.collector.push(event):
            with uninterrupted():
                self.engine.stop(event.request_id)
                del self._live[event.request_id]
        elif event.finish is not None:
            del self._live[event.request_id]
        if event.error is not None:
            for request_id in [rid for rid, other in self._live.items() if other is live]:
                self._forget(request_id)
        elif not live.collector.finished:
            return None
        output = live.collector.output()
        now = time.monotonic()
        output.milliseconds = {
            "prepare": 1e3 * (live.prepared - live.started),
            "first_token": 1e3 * (live.first_token - live.started),
            "total": 1e3 * (now - live.started),
        }
        if isinstance(output, RequestOutput):
            count = output.usage.completion_tokens
            output.metrics = metrics_of(count, live.started, live.prepared, live.waited_s, live.first_token, now)
        return output

    def _forget(self, request_id: str) -> None:
        with uninterrupted():
            self.engine.abort(request_id)
            self._live.pop(request_id, None)
            self._prompts.pop(request_id, None)

    def _drop(self, in_flight: Any) -> None:
        """Abort the rest of a run that ended early, and read the step that may be in flight."""
        for request_id in [*self._live, *self._prompts]:
            self._forget(request_id)
        self._unheard.clear()
        while in_flight is not None and self.engine.alive:
            in_flight, _ = self.engine.step(in_flight)


def _as_beheld_error(error: Exception) -> BeheldError:
    """Convert any error to a BeheldError: with `on_error="return"` no request's error may end the run."""
    if isinstance(error, BeheldError):
        return error
    made = EngineError(f"Preparing the request failed: {type(error).__name__}: {error}.", "Please report this.")
    made.__cause__ = error
    return made
