"""Requests that are added one by one, and an engine that the caller steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from beheld.api.collectors import Output
from beheld.api.feed import Fed, Job
from beheld.api.run import OfflineRun
from beheld.core.outputs import TokenEvent
from beheld.core.params import RequestOutputKind, SamplingParams


@dataclass(eq=False)
class StepwiseRun(OfflineRun):
    """An offline run without a loop of its own: `submit` adds a job, `advance` computes a step."""

    _numbers: int = 0
    _in_flight: Any = None
    _kinds: dict[int, RequestOutputKind] = field(default_factory=dict)

    def submit(self, job: Job) -> None:
        """Prepare a job and queue it.

        Raises:
            UserError, EngineError: it cannot run.
        """
        started = time.monotonic()
        requests = job.requests()
        kind = job.params.output_kind if isinstance(job.params, SamplingParams) else None
        if kind is not None:
            self._kinds[self._numbers] = kind
        fed = Fed(self._numbers, job, requests, None, started, time.monotonic())
        self._add(fed, job, "raise", at_end=kind is RequestOutputKind.FINAL_ONLY)
        self._numbers += 1

    def advance(self) -> list[Output]:
        """Compute a step; returns the outputs that it changed, with what each job's `output_kind` asks for.

        Raises:
            EngineDeadError: the engine accepts no more work.
            UserError, EngineError: a request failed; it is gone, and the others go on.
        """
        if not self.unfinished:
            return []
        self._in_flight, events = self._step(self._in_flight, "raise")
        changed: dict[int, Output] = {}
        for event in events:
            changed |= self._changed(event)
        for output in changed.values():
            if output.error is not None:
                raise output.error
        return list(changed.values())

    def _changed(self, event: TokenEvent) -> dict[int, Output]:
        live = self._live.get(event.request_id)
        if live is None:
            return {}
        ended = self._push(event, live)
        kind = self._kinds.get(live.index)
        if ended is not None:
            self._kinds.pop(live.index, None)
        if kind is RequestOutputKind.DELTA and (ended is None or ended.error is None):
            return {live.index: live.collector.delta()}
        if ended is None and kind is RequestOutputKind.FINAL_ONLY:
            return {}
        return {live.index: ended or live.collector.output()}

    def cancel(self, job_id: str) -> None:
        """End a job; no output follows."""
        for name in [name for name in self._live if name == job_id or name.startswith(f"{job_id}#")]:
            self._forget(name)

    def cancel_all(self) -> None:
        """End all jobs, and read what is in flight; no output follows."""
        self._drop(self._in_flight)
        self._in_flight = None

    @property
    def unfinished(self) -> int:
        """How many jobs have not ended."""
        return len({live.index for live in self._live.values()})
