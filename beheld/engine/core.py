"""The engine: one step plans, runs and updates; everything else is a noun it calls."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import BeheldError
from beheld.core.outputs import TokenEvent
from beheld.core.plan import SeqSlice, StepPlan, StepResult
from beheld.core.request import Request
from beheld.executor.executor import Executor
from beheld.scheduler.scheduler import Scheduler
from beheld.utils.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class InFlight:
    """A launched step whose result has not been read: its plan, and a handle, or the result if it had to be retried."""

    plan: StepPlan
    handle: Any
    result: StepResult | None = None


class EngineCore:
    """Scheduler and executor, and the step that joins them."""

    def __init__(self, info: ModelInfo, config: EngineConfig, executor: Executor) -> None:
        self.executor = executor
        self.scheduler = Scheduler(config, info, executor.capacity)
        self._overlap = config.overlap

    def add(self, request: Request) -> None:
        """Queue a request; raises a UserError or CapacityError if it can never run."""
        self.scheduler.add(request)

    def step(self, in_flight: InFlight | None) -> tuple[InFlight | None, list[TokenEvent]]:
        """Plan and launch the next step, then read the one in flight.

        With overlap the device works on the new step while the host reads the old one; without it, the new step is
        read at once and nothing stays in flight.
        """
        plan = self.scheduler.schedule()
        launched = None if plan is None else self._launch(plan)
        if self._overlap:
            return launched, [] if in_flight is None else self._update(in_flight)
        assert in_flight is None
        return None, [] if launched is None else self._update(launched)

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return self.scheduler.has_work

    def _launch(self, plan: StepPlan) -> InFlight:
        try:
            return InFlight(plan, self.executor.launch(plan))
        except Exception as error:
            return InFlight(plan, None, self._retry(plan, error))

    def _update(self, step: InFlight) -> list[TokenEvent]:
        result = step.result
        if result is None:
            try:
                result = self.executor.collect(step.handle)
            except Exception as error:
                result = self._retry(step.plan, error)
        return self.scheduler.update(step.plan, result)

    def _retry(self, plan: StepPlan, error: Exception) -> StepResult:
        """Run a failed plan again, one sequence at a time: only the culprit fails."""
        logger.warning("A step failed (%s); retrying its %d sequences one by one.", _reason(error), len(plan.slices))
        results: list[StepResult] = []
        failed: dict[int, str] = {}
        lost: list[bytes] = []
        done: set[bytes] = set()
        for index, piece in enumerate(plan.slices):
            part = _part(plan, piece, first=index == 0, done=done)
            try:
                results.append(self.executor.collect(self.executor.launch(part)))
                done.update(item.digest for item in part.encode)
            except Exception as own:
                failed[piece.row] = _reason(own)
                lost.extend(item.digest for item in part.encode)
        merged = StepResult(plan.id, {}, {}, {}, failed, tuple(d for d in lost if d not in done))
        for result in results:
            merged = StepResult(
                plan.id,
                {**merged.tokens, **result.tokens},
                {**merged.logprobs, **result.logprobs},
                {**merged.prompt_logprobs, **result.prompt_logprobs},
                {**merged.failed, **result.failed},
                merged.lost,
            )
        return merged

    def fail_all(self, error: BeheldError) -> list[TokenEvent]:
        """End every request with `error`."""
        events = (self.scheduler.fail(request_id, error) for request_id in self.scheduler.all_request_ids())
        return [event for event in events if event is not None]


def _part(plan: StepPlan, piece: SeqSlice, *, first: bool, done: set[bytes]) -> StepPlan:
    """The part of a plan that one sequence needs; what belongs to no sequence goes with the first."""
    spans = [span for a in plan.admitted if a.row == piece.row for span in a.spans]
    wanted = {span.digest for span in spans} if spans else {item.digest for item in plan.encode}
    return dataclasses.replace(
        plan,
        slices=(piece,),
        admitted=tuple(a for a in plan.admitted if a.row == piece.row),
        encode=tuple(item for item in plan.encode if item.digest in wanted and item.digest not in done),
        released=plan.released if first else (),
        forget=plan.forget if first else (),
        copies=plan.copies if first else (),
    )


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


