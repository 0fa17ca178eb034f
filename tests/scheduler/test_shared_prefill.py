"""Requests that arrive together and begin alike compute their common prefix once."""

from __future__ import annotations

import pytest

from beheld.core.plan import StepPlan
from beheld.core.request import Request
from tests.fakes import FULL, fake_config, fake_info, fake_item, fake_request, sliding
from tests.scheduler.drive import Bench

COMMON = tuple(3 + index % 61 for index in range(160))


def bench(*, overlap: bool = False, groups: tuple = (FULL,), num_blocks: int = 512, **changes: object) -> Bench:
    limits = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 1024, **changes}
    config = fake_config(overlap=overlap, **limits)
    return Bench(config, fake_info(*groups), num_blocks)


def answers(count: int) -> list[Request]:
    """As `n` answers to one prompt arrive."""
    return [fake_request(str(index), COMMON, 5, max_tokens=4) for index in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
def test_several_answers_compute_their_prompt_once(overlap: bool) -> None:
    it = bench(overlap=overlap)
    it.run(*answers(8))
    # The last token of each prompt, three tokens fed back, and with overlap one that was computed for nothing.
    assert it.computed() <= 161 + 7 * 1 + 8 * 4
    assert len({tuple(it.tokens(str(index))) for index in range(8)}) == 1


def test_own_parts_follow_a_shared_document() -> None:
    it = bench()
    it.run(*(fake_request(str(index), COMMON, 70 + index, 5, 6, 7, max_tokens=1) for index in range(6)))
    assert it.computed() == 160 + 6 * 4


def test_an_image_is_encoded_once_and_its_positions_are_computed_once() -> None:
    it = bench()
    image = fake_item("page", 40)
    it.run(*(fake_request(str(index), COMMON[:100], image, 70 + index, max_tokens=1) for index in range(4)))
    assert it.computed() == 140 + 4
    assert it.scheduler.stats().num_encoded == 1


def test_one_waits_only_for_what_it_shares() -> None:
    it = bench()
    long = fake_request("long", COMMON, 9, COMMON, COMMON, COMMON[:79], max_tokens=1)
    it.add(long, fake_request("short", COMMON, 70, max_tokens=1))
    it.step()
    assert rows(it.step()) == 2, "the shared part is there, and the long prompt is not done"
    it.run()


def test_others_pass_those_that_wait() -> None:
    it = bench()
    it.add(*answers(2), fake_request("other", range(3, 20), max_tokens=1))
    assert rows(it.step()) == 2


def test_a_short_common_prefix_is_not_worth_waiting() -> None:
    it = bench()
    it.add(*(fake_request(str(index), COMMON[:100], 70 + index, max_tokens=1) for index in range(3)))
    assert rows(it.step()) == 3


def test_nobody_waits_for_another_client_or_for_a_worse_priority() -> None:
    it = bench()
    it.add(*(fake_request(str(index), COMMON, 5, client=f"client {index}") for index in range(2)))
    assert rows(it.step()) == 2
    it = bench(policy="priority", max_num_batched_tokens=300)
    it.add(fake_request("first", COMMON, COMMON, COMMON, 5, priority=5))
    it.step()
    it.add(fake_request("urgent", COMMON, COMMON, COMMON, 5, priority=0))
    it.step()
    assert it.scheduler.num_running == 2


def test_without_a_prefix_cache_nobody_waits() -> None:
    it = bench(prefix_caching=False)
    it.add(*answers(3))
    assert rows(it.step()) == 3


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_those_that_wait_go_on_when_the_one_that_computes_ends(end: str) -> None:
    it = bench(max_num_batched_tokens=64)
    it.add(*answers(3))
    it.step()
    if end == "abort":
        it.scheduler.abort("0")
    else:
        it.runner.broken_tokens = {COMMON[100]}
    for _ in range(50):
        if it.scheduler.has_work:
            it.step()
    if end == "abort":
        assert it.tokens("1") == it.tokens("2") != []
    assert not it.scheduler.has_work


def test_one_that_waits_may_end() -> None:
    it = bench()
    it.add(*answers(3))
    it.step()
    it.scheduler.abort("1")
    it.scheduler.check()
    it.run()
    assert it.tokens("0") == it.tokens("2") != []


def test_preemption_of_the_one_that_computes_holds_up_nobody() -> None:
    # Room for two and a half prompts.
    it = bench(num_blocks=104, max_num_batched_tokens=64, groups=(FULL, sliding(16)))
    it.run(*answers(6), *(fake_request(f"other {index}", range(3 + index, 60), max_tokens=40) for index in range(6)))


def rows(plan: StepPlan | None) -> int:
    assert plan is not None
    return len(plan.slices)
