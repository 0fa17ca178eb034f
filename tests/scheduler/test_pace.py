"""Steps are short while others wait: what positions cost is learned, and prefill is limited by it (case 119)."""

from __future__ import annotations

import random

import pytest

from beheld.core.plan import StepPlan
from beheld.scheduler.pace import StepPace
from tests.fakes import FULL, fake_config, fake_info, fake_item, fake_request
from tests.scheduler.drive import Bench

pytestmark = pytest.mark.case(119)

# Seconds of a step, of a plain position, and of one with a report.
BASE_S, PLAIN_S, REPORTED_S = 0.005, 0.0002, 0.002
MOST_S = 0.1


def took(num_plain: int, num_reported: int) -> float:
    return BASE_S + PLAIN_S * num_plain + REPORTED_S * num_reported


class Timed(Bench):
    """Steps take the time of their positions, on a clock that belongs to the bench."""

    seconds: list[float]

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        assert plan is not None
        flight = self.scheduler._flights[plan.id]
        self.seconds.append(took(flight.num_plain, flight.num_reported))
        self.plans.append(plan)
        self.runner.launch(plan)
        self.take(self.scheduler.update(plan, self.runner.collect(plan), self.seconds[-1]))
        return plan


def timed(**changes: object) -> Timed:
    options = {"max_num_seqs": 80, "max_num_batched_tokens": 2048, "max_model_len": 9000, "max_step_s": MOST_S}
    bench = Timed(fake_config(**{**options, **changes}), fake_info(FULL), 40_000)
    bench.seconds = []
    return bench


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 90), k=length)


# ---- what is learned -------------------------------------------------------------------------------------------------


def test_costs_of_both_kinds_are_learned_from_mixed_steps() -> None:
    pace = StepPace(MOST_S)
    rng = random.Random(3)
    for _ in range(60):
        counts = rng.randrange(200), rng.randrange(40)
        pace.observe(*counts, took(*counts))
        pace.observe(0, 0, took(0, 0))
    assert pace.units() == pytest.approx((MOST_S - BASE_S) / PLAIN_S, rel=0.15)
    assert pace.weight == pytest.approx(REPORTED_S / PLAIN_S, rel=0.25)


def test_before_anything_is_known_a_step_is_short() -> None:
    assert StepPace(MOST_S).units() == 256


def test_one_long_step_does_not_keep_later_ones_short() -> None:
    pace = StepPace(MOST_S)
    for _ in range(5):
        pace.observe(400, 0, took(400, 0))
    usual = pace.units()
    assert usual is not None
    pace.observe(400, 0, 5.0)
    assert (pace.units() or 0) >= usual // 3
    for _ in range(4):
        count = pace.units() or 0
        pace.observe(count, 0, took(count, 0))
    assert pace.units() == pytest.approx(usual, rel=0.1)


def test_where_decoding_alone_is_slow_prefill_may_take_twice_as_long() -> None:
    pace = StepPace(MOST_S)
    for _ in range(20):
        pace.observe(0, 0, 0.2)
        pace.observe(100, 0, 0.2 + 100 * 0.002)
    assert pace.units() == pytest.approx(200, rel=0.1)


# ---- what is planned -------------------------------------------------------------------------------------------------


def attacked() -> Timed:
    """One client's 64 prompts of 8,000 ids with log-probabilities, ten steps after they began."""
    bench = timed()
    for number in range(64):
        ids = [5, number + 3, *prompt(7998)]
        bench.add(fake_request(f"a{number}", ids, client="a", prompt_logprobs=5, max_tokens=1))
    bench.step()
    return bench


def test_beside_log_probabilities_of_prompts_steps_are_short_and_a_chat_is_in_the_first() -> None:
    bench = attacked()
    begun = len(bench.seconds)
    bench.add(fake_request("chat", prompt(30), client="b", max_tokens=8))
    while not bench.events["chat"] or bench.events["chat"][-1].finish is None:
        before = bench.computed()
        bench.step()
        assert bench.computed() - before > 4, "the attacker's prompts go on"
    waits = bench.seconds[begun:]
    assert len(waits) <= 9, "a step each token, and one more at most"
    # The first of them finds the cost that is known from one step.
    assert max(waits) < 2.2 * MOST_S
    assert sum(waits) < 1.0


def test_alone_steps_are_longer_and_still_bounded() -> None:
    bench = attacked()
    # Before a cost is known there is no limit.
    assert bench.seconds[0] > 2 * 16 * MOST_S
    bench.step()
    assert bench.seconds[1] == pytest.approx(16 * MOST_S, rel=0.1)


@pytest.mark.parametrize("client", ["", "named"])
def test_decoding_goes_on_beside_one_clients_own_long_prompts(client: str) -> None:
    """But an offline run, whose client has no name, waits for all of its answers."""
    bench = timed()
    bench.add(fake_request("d", prompt(4), client=client, max_tokens=100))
    for _ in range(3):
        bench.step()
    bench.add(fake_request("long", prompt(8000), client=client, max_tokens=1))
    for _ in range(4):
        bench.step()
    longest = max(bench.seconds[3:])
    assert longest < 1.1 * MOST_S if client else longest > 3 * MOST_S


def test_what_must_be_computed_at_once_may_exceed_the_limit() -> None:
    bench = Timed(
        fake_config(max_num_batched_tokens=2048, max_model_len=4000, max_encoder_tokens=800, max_step_s=MOST_S),
        fake_info(FULL, atomic_spans=True),
        4000,
    )
    bench.seconds = []
    bench.add(fake_request("d", prompt(4), client="a", max_tokens=100))
    bench.add(fake_request("e", prompt(4), client="b", max_tokens=100))
    bench.step()
    bench.scheduler._pace = limited = StepPace(MOST_S)
    limited.observe(100, 0, 100 * 0.01)
    assert (limited.units() or 0) < 40
    bench.add(fake_request("image", 5, fake_item("i", 700), 5, client="b", max_tokens=1))
    for _ in range(8):
        bench.step()
    assert bench.events["image"]


def test_units_beyond_a_steps_positions_do_not_keep_a_picture_waiting() -> None:
    """A limit of many units, on a fast device, is never reached by shares: a step has fewer positions."""
    bench = Timed(
        fake_config(max_num_batched_tokens=1024, max_model_len=4000, max_encoder_tokens=800, max_step_s=MOST_S),
        fake_info(FULL, atomic_spans=True),
        4000,
    )
    bench.seconds = []
    bench.scheduler._pace = fast = StepPace(MOST_S)
    fast.observe(1000, 0, 0.001)
    fast.observe(0, 100, 0.0008)
    assert (fast.units() or 0) > 1024
    assert fast.weight * 700 > 1024
    for client in "ab":
        item = fake_item(f"i{client}", 700)
        bench.add(fake_request(f"image {client}", item, 5, client=client, max_tokens=1, prompt_logprobs=1))
    while not all(bench.events[f"image {client}"] for client in "ab"):
        bench.step()
        assert len(bench.plans) < 30


def test_reserved_positions_with_a_report_count_as_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = attacked()
    bench.add(fake_request("chat", prompt(30), client="b", max_tokens=8))
    scheduler = bench.scheduler
    budgets: list[int] = []

    def share(budget: int, *_: object) -> dict[str, int]:
        budgets.append(budget)
        return {}

    monkeypatch.setattr(scheduler._fair, "share", share)
    (reported, *_) = [one for one in scheduler._running if one.prefills]
    for most, left in ((100, 100 - 3 * 10), (20, 0)):
        step = scheduler._new_step()
        step.limit, step.weight, step.reserved = most, 10, {reported: 3}
        scheduler._share(step, ["b"])
        assert budgets.pop() == left
