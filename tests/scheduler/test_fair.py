"""Clients share prefill fairly: deficit round robin, places, and that nothing changes with one client (case 96)."""

from __future__ import annotations

import hashlib
import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from beheld.core.plan import StepPlan
from beheld.core.pooling_params import Pooling
from beheld.core.request import Request
from beheld.scheduler.fair_share import FairShare
from tests.fakes import FULL, fake_config, fake_info, fake_item, fake_request, sliding
from tests.long import sized
from tests.scheduler.drive import Bench

pytestmark = pytest.mark.case(96)

# Of the plans of `mixed_load`, as they were before clients shared steps.
PLANS_OF_ONE_CLIENT = {
    "fcfs": "58ca9c006fe575d8",
    "priority": "c59dec911e4835e5",
    "overlap": "5e609b0c0d105426",
}


# ---- deficit round robin ---------------------------------------------------------------------------------------------


def share(fair: FairShare, budget: int, **wanted: int) -> dict[str, int]:
    return fair.share(budget, wanted, dict.fromkeys(wanted, 0))


def test_clients_share_equally_and_what_one_leaves_goes_to_the_others() -> None:
    fair = FairShare(8, 64)
    assert share(fair, 64, a=1000, b=1000) == {"a": 32, "b": 32}
    assert share(fair, 64, a=1000, b=5) == {"a": 59, "b": 5}
    assert share(fair, 64, a=1000) == {"a": 64}
    assert share(fair, 64, a=10, b=5) == {"a": 10, "b": 5}
    assert share(fair, 0, a=10) == {}


def test_a_turn_that_the_end_of_a_step_interrupts_goes_on() -> None:
    fair = FairShare(8, 64)
    assert share(fair, 10, a=100, b=100, c=100) == {"a": 8, "b": 2}
    assert share(fair, 10, a=100, b=100, c=100) == {"b": 6, "c": 4}
    assert share(fair, 10, a=100, b=100, c=100) == {"c": 4, "a": 6}


def test_over_many_steps_each_gets_the_same_however_many_there_are() -> None:
    fair = FairShare(8, 20)
    names = [f"c{number}" for number in range(7)]
    total = dict.fromkeys(names, 0)
    for _ in range(700):
        for client, tokens in share(fair, 20, **dict.fromkeys(names, 10**6)).items():
            total[client] += tokens
    assert max(total.values()) - min(total.values()) <= 8


def test_a_client_that_wants_nothing_keeps_no_credit() -> None:
    fair = FairShare(8, 64)
    share(fair, 4, a=100, b=100)
    share(fair, 8, b=100)
    assert share(fair, 8, a=100, b=100) == {"b": 8}


def test_better_priorities_get_all_they_want_first() -> None:
    fair = FairShare(8, 64)
    assert fair.share(64, {"a": 100, "b": 50, "c": 3}, {"a": 1, "b": 0, "c": 0}) == {"b": 50, "c": 3, "a": 11}


def test_what_is_too_small_to_be_used_is_kept_and_grows() -> None:
    fair = FairShare(8, 64)
    steps = 0
    while (own := share(fair, 64, b=1000, c=1000, a=60).get("a", 0)) < 60:
        fair.defer("a", own, own)
        steps += 1
        assert steps < 10
    assert steps > 0


# ---- one client ------------------------------------------------------------------------------------------------------


def mixed_load(client: str) -> list[Request]:
    """Text and images, long and short, some to be pooled, of all priorities."""
    rng = random.Random(7)
    made = []
    for number in range(60):
        own = [rng.randrange(3, 90) for _ in range(rng.choice([3, 9, 40, 90]))]
        parts: list[object] = [own, fake_item(f"i{number % 5}", 7), 5] if number % 3 == 0 else [own]
        options: dict[str, object] = {"params": Pooling(method="mean")} if number % 7 == 6 else {"max_tokens": 12}
        made.append(
            fake_request(
                str(number), *parts, priority=rng.randrange(3), arrival=float(number), client=client, **options
            )
        )
    return made


def plans(how: str, client: str) -> str:
    config = fake_config(
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=128,
        max_encoder_tokens=20,
        policy="priority" if how == "priority" else "fcfs",
        overlap=how == "overlap",
    )
    bench = Bench(config, fake_info(FULL, sliding(9)), num_blocks=60)
    load = mixed_load(client)
    bench.add(*load[:30])
    for _ in range(20):
        bench.step()
    bench.run(*load[30:])
    assert bench.scheduler.stats().num_preemptions > 0
    return hashlib.sha256("\n".join(map(written, bench.plans)).encode()).hexdigest()[:16]


def written(plan: StepPlan) -> str:
    admitted = [(a.row, a.num_computed, a.blocks, len(a.token_ids)) for a in plan.admitted]
    slices = [(s.row, s.start, s.stop, s.new_blocks, s.wanted, s.token_ids) for s in plan.slices]
    encode = [item.digest for item in plan.encode]
    return repr((plan.id, slices, admitted, encode, plan.released, plan.forget))


@pytest.mark.parametrize("client", ["", "somebody"])
@pytest.mark.parametrize("how", ["fcfs", "priority", "overlap"])
def test_with_one_client_plans_are_as_without_clients(how: str, client: str) -> None:
    assert plans(how, client) == PLANS_OF_ONE_CLIENT[how]


# ---- several clients -------------------------------------------------------------------------------------------------


def long_prompts(count: int, length: int, client: str, **options: object) -> list[Request]:
    """Prompts that share nothing."""
    rng = random.Random(client)
    return [
        fake_request(f"{client}{number}", [rng.randrange(3, 90) for _ in range(length)], client=client, **options)
        for number in range(count)
    ]


def steps_to_first_token(bench: Bench, request_id: str, most: int) -> int:
    for number in range(1, most + 1):
        bench.step()
        if bench.events[request_id]:
            return number
    raise AssertionError(f"no token in {most} steps")


def test_a_short_prompt_needs_one_step_beside_eight_long_ones() -> None:
    bench = Bench(fake_config(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=1100), fake_info(FULL), 4000)
    bench.add(*long_prompts(8, 1000, "hog", max_tokens=4))
    for _ in range(3):
        bench.step()
    bench.add(*long_prompts(1, 12, "other", max_tokens=4))
    assert steps_to_first_token(bench, "other0", 1) == 1
    bench.run()
    # The others' prompts went on meanwhile, and each step was full.
    assert all(plan.num_tokens == 64 for plan in bench.plans[:100])


def test_two_long_prompts_of_two_clients_advance_together_and_decoding_never_waits() -> None:
    bench = Bench(fake_config(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=1100), fake_info(FULL), 4000)
    bench.add(fake_request("d", 5, max_tokens=200))
    bench.step()
    bench.add(*long_prompts(3, 600, "a", max_tokens=1), *long_prompts(1, 600, "b", max_tokens=1))
    for _ in range(10):
        before = len(bench.tokens("d"))
        plan = bench.step()
        assert plan is not None
        assert len(bench.tokens("d")) == before + 1
        assert plan.num_tokens == 64
    # By rows: the one that decodes, and one of each client.
    computed = sorted(
        sum(s.stop - s.start for plan in bench.plans for s in plan.slices if s.row == row) for row in range(3)
    )
    assert computed[0] == 11
    assert computed[2] - computed[1] <= 16
    bench.run()


def test_a_client_without_a_place_takes_one_of_the_client_that_has_most() -> None:
    bench = Bench(fake_config(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=900), fake_info(FULL), 4000)
    bench.add(*long_prompts(6, 10, "hog", max_tokens=800))
    for _ in range(5):
        bench.step()
    assert bench.scheduler.num_running == 4
    bench.add(*long_prompts(2, 10, "a", max_tokens=20), *long_prompts(1, 10, "b", max_tokens=20))
    assert steps_to_first_token(bench, "a0", 2) <= 2
    assert steps_to_first_token(bench, "b0", 3) <= 3
    # Each of the three has a place now, and no further one is taken from anybody.
    taken = bench.scheduler.stats().num_preemptions
    assert taken == 2
    for _ in range(5):
        bench.step()
    assert bench.scheduler.stats().num_preemptions == taken
    bench.run()


def test_a_client_without_blocks_takes_those_of_the_client_that_has_most() -> None:
    bench = Bench(fake_config(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=400), fake_info(FULL), 101)
    bench.add(*long_prompts(8, 44, "hog", max_tokens=300))
    for _ in range(10):
        bench.step()
    bench.add(*long_prompts(1, 40, "other", max_tokens=8))
    assert steps_to_first_token(bench, "other0", 6) <= 6
    # It is the hog's own sequences that lose their blocks; the other waits a step at most for each block.
    while bench.events["other0"][-1].finish is None:
        before = len(bench.tokens("other0"))
        bench.step()
        bench.step()
        assert len(bench.tokens("other0")) > before
    assert sum(a.num_prompt == 40 for plan in bench.plans for a in plan.admitted) == 1
    bench.run()


def test_prompts_that_are_computed_at_once_get_their_turn() -> None:
    config = fake_config(
        max_num_seqs=16, max_num_batched_tokens=64, max_model_len=200, chunked_prefill=False, prefix_caching=False
    )
    bench = Bench(config, fake_info(FULL), 4000)
    bench.add(*long_prompts(20, 60, "a", max_tokens=1), *long_prompts(20, 50, "b", max_tokens=1))
    for _ in range(12):
        bench.step()
    done = [sum(bool(bench.events[f"{client}{n}"]) for n in range(20)) for client in "ab"]
    assert min(done) >= 4
    bench.run()


def test_embeddings_that_a_better_priority_waits_for_are_used_up_first() -> None:
    config = fake_config(max_num_batched_tokens=8, max_encoder_tokens=12, policy="priority")
    bench = Bench(config, fake_info(FULL), 4000)
    bench.add(fake_request("holder", 5, fake_item("a", 12), 5, max_tokens=2, client="slow", priority=1))
    bench.step()
    waiting = fake_request("waiting", 5, fake_item("b", 12), [7] * 30, max_tokens=2, client="quick", priority=0)
    bench.run(waiting, most_steps=20)
    assert bench.scheduler.stats().num_preemptions == 0


def test_embeddings_are_used_up_beside_a_better_priority_that_fills_every_step() -> None:
    config = fake_config(max_num_batched_tokens=8, max_encoder_tokens=12, policy="priority", max_num_seqs=16)
    bench = Bench(config, fake_info(FULL), 4000)
    bench.add(fake_request("holder", 5, fake_item("a", 12), 5, max_tokens=2, client="slow", priority=1))
    bench.step()
    bench.add(*long_prompts(8, 200, "busy", max_tokens=1))
    bench.add(fake_request("waiting", 5, fake_item("b", 12), 5, max_tokens=2, client="quick", priority=0))
    # One step to see that it waits, two for the rest of the holder's image; then its own image gets turns.
    assert steps_to_first_token(bench, "waiting", 12) <= 12
    bench.run()


@pytest.mark.parametrize("seed", range(20, 100))
def test_loads_in_little_room_end(seed: int) -> None:
    """Three clients of two priorities share six blocks and one or two images; steps without a usable share happened."""
    rng = random.Random(seed)
    caching, chunked = rng.random() < 0.5, rng.random() < 0.7
    config = fake_config(
        max_num_seqs=5,
        max_num_batched_tokens=5,
        max_model_len=24,
        policy="priority",
        prefix_caching=caching,
        max_encoder_tokens=12,
        chunked_prefill=chunked,
    )
    bench = Bench(config, fake_info(FULL), 7)
    count = 0
    for _ in range(40):
        for _ in range(rng.randrange(3)):
            repeated = [3, 4, 5, 6] * rng.choice([1, 2])
            own = [rng.randrange(3, 90) for _ in range(rng.choice([2, 4, 5]))]
            parts: list[object] = [repeated if rng.random() < 0.5 else own]
            if chunked and rng.random() < 0.4:
                size = rng.choice([3, 7, 12])
                parts.append(fake_item(f"{rng.randrange(3)} of {size}", size))
            options = {"max_tokens": 2 if len(parts) > 1 else rng.choice([1, 10]), "priority": rng.randrange(2)}
            fits = parts if chunked else [[3, 4, 5]]
            bench.add(fake_request(str(count), *fits, 5, client=f"c{rng.randrange(3)}", **options))  # type: ignore[arg-type]
            count += 1
        for _ in range(rng.randrange(1, 4)):
            bench.step()
    bench.run(most_steps=2000)


def test_within_a_client_the_order_is_that_of_arrival_and_of_priorities() -> None:
    config = fake_config(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=200, policy="priority")
    bench = Bench(config, fake_info(FULL), 4000)
    urgent = fake_request("urgent", range(3, 40), max_tokens=1, client="a", priority=-1)
    bench.add(*long_prompts(3, 30, "a", max_tokens=1), *long_prompts(3, 30, "b", max_tokens=1), urgent)
    bench.run()
    order = sorted(bench.events, key=lambda name: first_plan(bench, name))
    assert order[0] == "urgent"
    for client in "ab":
        assert [name for name in order if name.startswith(client)] == [f"{client}{n}" for n in range(3)]


def first_plan(bench: Bench, request_id: str) -> int:
    prompt = {r.token_ids: r.id for r in [*long_prompts(3, 30, "a"), *long_prompts(3, 30, "b")]}
    prompt[tuple(range(3, 40))] = "urgent"
    return next(
        plan.id for plan in bench.plans for a in plan.admitted if prompt[a.token_ids[: a.num_prompt]] == request_id
    )


@settings(
    max_examples=sized(8, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    hogs=st.integers(1, 4),
    depth=st.integers(1, 12),
    length=st.integers(1, 150),
    answer=st.integers(1, 40),
    own=st.integers(1, 60),
    rows=st.sampled_from([5, 8, 16]),
    budget=st.sampled_from([16, 64]),
    num_blocks=st.sampled_from([60, 120, 1000]),
    groups=st.sampled_from([(FULL,), (FULL, sliding(9))]),
    overlap=st.booleans(),
)
def test_whatever_others_do_a_client_gets_its_first_token_within_some_steps(
    hogs: int,
    depth: int,
    length: int,
    answer: int,
    own: int,
    rows: int,
    budget: int,
    num_blocks: int,
    groups: tuple[object, ...],
    overlap: bool,
) -> None:
    """Other clients always have `depth` requests each in work. The bound: a turn of each client for each quantum of the
    prompt, what decodes being taken from the budget; and a step for each sequence that must leave first."""
    config = fake_config(
        max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=200, overlap=overlap, prefix_caching=False
    )
    bench = Bench(config, fake_info(*groups), num_blocks)  # type: ignore[arg-type]
    rng, count = random.Random(0), 0

    def refill() -> None:
        nonlocal count
        live = set(bench.scheduler.all_request_ids())
        for hog in range(hogs):
            for _ in range(depth - sum(name.startswith(f"h{hog}.") for name in live)):
                prompt = [rng.randrange(3, 90) for _ in range(length)]
                bench.add(fake_request(f"h{hog}.{count}", prompt, max_tokens=answer, client=f"h{hog}"))
                count += 1

    for _ in range(15):
        refill()
        bench.step()
    bench.add(fake_request("mine", range(3, 3 + own), max_tokens=1, client="mine"))
    left = max(1, budget - rows)
    bound = rows + 8 + (hogs + 1) * (-(-own // (budget // 8)) + 1) * (budget // 8) // left
    if num_blocks < 1000:
        # Where no client has two sequences, one has to end first, perhaps after it was computed again.
        bound = 400
    for _ in range(bound):
        refill()
        bench.step()
        if bench.events["mine"]:
            return
    left_out = (hogs, depth, length, answer, own, rows, budget, num_blocks, len(groups), overlap)
    raise AssertionError(f"nothing in {bound} steps with {left_out}")
