"""Runs requests to their end through a scheduler and the fake device, checking invariants at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.outputs import TokenEvent
from beheld.core.plan import StepPlan
from beheld.core.request import Request
from beheld.scheduler.scheduler import Scheduler
from tests.fake_store import FakeStore
from tests.fakes import FakeRunner, fake_capacity


@dataclass
class Bench:
    """A scheduler and its device, step by step.

    `events` holds all events by request; `plans` every plan; `flight` the plan whose result has not been read.
    """

    config: EngineConfig
    info: ModelInfo
    num_blocks: int | tuple[int, ...] = 512
    events: dict[str, list[TokenEvent]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    flight: StepPlan | None = None
    store: FakeStore | None = None

    def __post_init__(self) -> None:
        capacity = fake_capacity(self.info, self.config, self.num_blocks)
        self.scheduler = Scheduler(self.config, self.info, capacity, self.store)
        self.runner = FakeRunner(self.config, self.info, capacity)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.events[request.id] = []

    def step(self) -> StepPlan | None:
        """One step of the engine, with overlap or without as the configuration says."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            self.plans.append(plan)
            self.runner.launch(plan)
        done = plan
        if self.config.overlap:
            done, self.flight = self.flight, plan
        if done is not None:
            self.take(self.scheduler.update(done, self.runner.collect(done)))
        self.scheduler.check()
        return plan

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.events[event.request_id].append(event)

    def run(self, *requests: Request, most_steps: int = 5000) -> None:
        """Add these and step until nothing is left."""
        self.add(*requests)
        for _ in range(most_steps):
            if not self.scheduler.has_work and self.flight is None:
                stats = self.scheduler.stats()
                assert stats.num_free_blocks == stats.num_blocks
                return
            self.step()
        raise AssertionError("does not end")

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.token_ids]

    def last(self, request_id: str) -> TokenEvent:
        return self.events[request_id][-1]

    def computed(self, row_of: int | None = None) -> int:
        """Positions computed in all plans so far (of one row, if given)."""
        return sum(s.stop - s.start for p in self.plans for s in p.slices if row_of is None or s.row == row_of)
