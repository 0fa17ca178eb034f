"""The step: order of launches with and without overlap, and that a failure stays with its culprit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from beheld.core.outputs import TokenEvent
from beheld.core.plan import StepPlan, StepResult
from beheld.core.request import FinishReason, Request
from beheld.engine.core import EngineCore, InFlight
from tests.fakes import FakeRunner, expected_tokens, fake_capacity, fake_config, fake_info, fake_item, fake_request


class FaultyRunner(FakeRunner):
    """Raises, before it computes anything, when a plan holds a row whose prompt has the token `fatal`."""

    fatal = 77

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.launched: list[int] = []
        self.events: list[str] = []
        self.plans: dict[int, StepPlan] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}

    def launch(self, plan: StepPlan) -> StepPlan:
        self._prompts.update({a.row: a.token_ids for a in plan.admitted})
        self.launched.append(len(plan.slices))
        self.events.append(f"launch {plan.id}")
        self.plans[plan.id] = plan
        if any(self.fatal in self._prompts[piece.row] for piece in plan.slices):
            if len(plan.slices) == 1:
                # A real runner fills the row before the forward pass fails.
                self._admit(plan.admitted[0])
            raise RuntimeError("a kernel failed")
        return super().launch(plan)

    def collect(self, plan: StepPlan) -> StepResult:
        self.events.append(f"collect {plan.id}")
        return super().collect(plan)


def make(**changes: Any) -> tuple[EngineCore, FaultyRunner]:
    info, config = fake_info(), fake_config(**changes)
    runner = FaultyRunner(config, info, fake_capacity(info, config))
    return EngineCore(info, runner), runner


def run(core: EngineCore, requests: list[Request]) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    in_flight: InFlight | None = None
    while core.scheduler.has_work or in_flight is not None:
        in_flight, new = core.step(in_flight)
        for event in new:
            events[event.request_id].append(event)
        core.scheduler.check()
    return events


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_those_computed_by_hand(overlap: bool) -> None:
    core, _ = make(overlap=overlap)
    picture = fake_item("cat", 9)
    requests = [fake_request(f"r{i}", [3, 4, 5 + i], picture, [6, i], max_tokens=7) for i in range(12)]
    events = run(core, requests)
    for request in requests:
        assert tokens(events[request.id]) == expected_tokens(request, 256)[0]


def test_overlap_launches_before_it_collects() -> None:
    core, runner = make(overlap=True)
    run(core, [fake_request("a", [3, 4], max_tokens=4)])
    assert runner.events[:4] == ["launch 0", "launch 1", "collect 0", "launch 2"]
    core, runner = make(overlap=False)
    run(core, [fake_request("a", [3, 4], max_tokens=4)])
    assert runner.events[:4] == ["launch 0", "collect 0", "launch 1", "collect 1"]


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_compute_different_sequences_at_a_time(stages: int) -> None:
    core, runner = make(overlap=True, pipeline_parallel_size=stages)
    requests = [fake_request(f"r{i}", [3, 4, 5 + i], max_tokens=9) for i in range(6)]
    requests.append(fake_request("long", range(100, 170), max_tokens=4))
    events = run(core, requests)
    for request in requests:
        assert tokens(events[request.id]) == expected_tokens(request, 256)[0]
    flying: list[StepPlan] = []
    counts: list[int] = []
    chunks = 0
    for event in runner.events:
        name, _, number = event.partition(" ")
        if name == "collect":
            assert flying.pop(0).id == int(number)
            continue
        plan = runner.plans[int(number)]
        rows = {piece.row for piece in plan.slices}
        for earlier in flying:
            # Nothing waits for a token of a step in flight; a prompt's next chunk needs none.
            assert rows.isdisjoint(piece.row for piece in earlier.slices if piece.wanted)
            chunks += any(piece.row in rows for piece in earlier.slices)
        flying.append(plan)
        counts.append(len(flying))
        assert len([piece for piece in plan.slices if piece.wanted]) <= -(-len(requests) // stages) + 1
    assert max(counts) == stages
    assert counts.count(stages) > len(counts) // 2
    assert chunks > 0


def test_only_the_culprit_of_a_failing_step_fails() -> None:
    core, runner = make()
    requests = [fake_request(f"r{i}", [3, 4, 5 + i], max_tokens=5) for i in range(5)]
    requests.insert(2, fake_request("bad", [3, FaultyRunner.fatal], max_tokens=5))
    events = run(core, requests)
    (event,) = events["bad"]
    assert event.finish is FinishReason.ERROR
    assert event.error is not None
    assert "a kernel failed" in str(event.error)
    for request in requests:
        if request.id != "bad":
            assert tokens(events[request.id]) == expected_tokens(request, 256)[0]
    assert core.stats().retried == 1
    assert 6 in runner.launched, "they did share a step"


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_what_a_failed_step_took_is_free_when_its_sequences_are_tried_alone(where: str) -> None:
    """In a real lack of memory they would fail with the culprit otherwise."""
    core, runner = make()
    taken: list[weakref.ref[set[int]]] = []
    alive: list[bool] = []

    def launch(plan: StepPlan) -> StepPlan:
        if where == "launch":
            crowded(plan)
        return plan

    def collect(plan: StepPlan) -> StepResult:
        if where == "collect":
            crowded(plan)
        return StepResult(plan.id, {piece.row: (5 + piece.row,) for piece in plan.slices})

    def crowded(plan: StepPlan) -> None:
        alive.extend(ref() is not None for ref in taken)
        if len(plan.slices) > 1:
            activations = {1, 2, 3}
            taken.append(weakref.ref(activations))
            raise RuntimeError("CUDA out of memory.")

    # Whatever has been computed when a step fails, here it may come again.
    runner.launch, runner.collect = launch, collect  # type: ignore[method-assign]
    events = run(core, [fake_request(f"r{i}", [3, 4, 5 + i], max_tokens=1) for i in range(3)])
    assert sorted(tokens(own)[0] for own in events.values()) == [5, 6, 7]
    # One by one, and then together.
    assert alive == [False] * 4


def test_a_failing_tower_fails_only_the_requests_that_show_its_picture() -> None:
    core, runner = make()
    broken, whole = fake_item("broken", 6), fake_item("whole", 6)
    runner.broken_digests.add(broken.digest)
    requests = [
        fake_request("bad", [3], broken, [4], max_tokens=4),
        fake_request("good", [3], whole, [4], max_tokens=4),
    ]
    events = run(core, requests)
    assert events["bad"][-1].finish is FinishReason.ERROR
    assert tokens(events["good"]) == expected_tokens(requests[1], 256)[0]
    again = fake_request("again", [3], whole, [5], max_tokens=4)
    assert tokens(run(core, [again])["again"]) == expected_tokens(again, 256)[0]


def test_a_row_that_breaks_ends_alone() -> None:
    core, runner = make()
    runner.broken_tokens.add(55)
    requests = [fake_request("bad", [3, 55, 4], max_tokens=4), fake_request("good", [3, 4], max_tokens=4)]
    events = run(core, requests)
    assert "NaN" in str(events["bad"][-1].error)
    assert tokens(events["good"]) == expected_tokens(requests[1], 256)[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_result_that_cannot_be_read(overlap: bool) -> None:
    core, runner = make(overlap=overlap)
    collect = runner.collect
    broken = [True]

    def collect_once_broken(plan: StepPlan) -> StepResult:
        result = collect(plan)
        if broken and plan.id == 1:
            broken.clear()
            raise RuntimeError("the device does not answer")
        return result

    runner.collect = collect_once_broken  # type: ignore[method-assign]
    events = run(core, [fake_request("a", [3, 4], max_tokens=4)])["a"]
    assert core.stats().scheduler.num_running == 0
    if overlap:
        assert events[-1].finish is FinishReason.ERROR
        assert "does not answer" in str(events[-1].error)
    else:
        assert core.stats().retried == 1
