"""Several tokens a step: a runner that expects tokens, confirms some of them, and has the others taken back."""

from __future__ import annotations

import pytest

from beheld.core.config import KVGroup
from beheld.core.plan import SeqSlice
from beheld.core.request import FinishReason, Request
from tests.fakes import (
    FULL,
    expected_tokens,
    fake_config,
    fake_info,
    fake_item,
    fake_request,
    half_right,
    sliding,
)
from tests.scheduler.drive import Bench
from tests.toy_recurrent import RECURRENT

BOTH = pytest.mark.parametrize("overlap", [False, True])


def make(*groups: KVGroup, most: int = 4, overlap: bool = False, num_blocks: int = 512, **changes: object) -> Bench:
    """A device that expects four tokens at a time, of which two are right."""
    config = fake_config(num_draft_tokens=most, overlap=overlap, **changes)
    bench = Bench(config, fake_info(*groups), num_blocks)
    bench.runner.drafts = half_right
    return bench


def assert_right(bench: Bench, *requests: Request) -> None:
    for request in requests:
        tokens, reason = expected_tokens(request, bench.config.max_model_len)
        assert bench.tokens(request.id) == tokens, request.id
        assert bench.last(request.id).finish == FinishReason(reason)


def slices(bench: Bench) -> list[SeqSlice]:
    return [piece for plan in bench.plans for piece in plan.slices]


@BOTH
def test_two_of_four_drafts_are_confirmed_and_one_token_more_comes(overlap: bool) -> None:
    bench = make(overlap=overlap)
    request = fake_request("1", range(5), max_tokens=10)
    bench.run(request)
    assert_right(bench, request)
    assert [len(event.token_ids) for event in bench.events["1"]] == [1, 3, 3, 3]
    assert [(p.start, p.stop, p.wanted) for p in slices(bench)] == [(0, 5, 1), (5, 10, 5), (8, 13, 5), (11, 14, 3)]
    tokens = bench.tokens("1")
    assert slices(bench)[1].token_ids[:3] == tuple(tokens[:3])
    assert slices(bench)[1].token_ids[3] != tokens[3]
    assert (bench.runner.num_accepted, bench.runner.num_rejected) == (6, 4)


def test_blocks_of_rejected_drafts_are_given_back_at_once() -> None:
    bench = make()
    bench.add(fake_request("1", range(6), max_tokens=30))
    total = bench.scheduler.stats().num_free_blocks[0]
    bench.step()
    assert total - bench.scheduler.stats().num_free_blocks[0] == 2
    plan = bench.scheduler.schedule()
    assert plan is not None
    # Positions 6 to 10 lie in three blocks; 6 to 8 are right, and begin the third.
    assert [(p.start, p.stop) for p in plan.slices] == [(6, 11)]
    assert total - bench.scheduler.stats().num_free_blocks[0] == 3
    bench.runner.launch(plan)
    bench.take(bench.scheduler.update(plan, bench.runner.collect(plan)))
    assert total - bench.scheduler.stats().num_free_blocks[0] == 3
    bench.step()
    # 9 to 13 take a fourth; 9 to 11 are right and fill the third.
    assert total - bench.scheduler.stats().num_free_blocks[0] == 3
    bench.scheduler.check()


@BOTH
def test_an_answer_ends_within_the_tokens_of_a_step(overlap: bool) -> None:
    plain = fake_request("plain", range(5), max_tokens=12)
    tokens, _ = expected_tokens(plain, 256)
    # The second of the three tokens of the second step.
    stop = tokens[2]
    assert stop not in tokens[:2]
    bench = make(overlap=overlap)
    request = fake_request(
        "1", range(5), max_tokens=12, stop_ids=frozenset({stop}), own_stop_ids=frozenset({stop}), logprobs=1
    )
    late = fake_request("2", range(5), max_tokens=12, min_tokens=4, stop_ids=frozenset({stop}))
    bench.run(request, late)
    assert_right(bench, request, late)
    last = bench.last("1")
    assert (last.finish, last.stop_id, last.token_ids) == (FinishReason.STOP, stop, tuple(tokens[1:3]))
    assert [entry.token_id for event in bench.events["1"] for entry in event.logprobs] == tokens[:3]
    assert len(bench.tokens("2")) >= 4


@BOTH
@pytest.mark.parametrize("groups", [(FULL,), (sliding(6),), (sliding(3), FULL)])
def test_preempted_answers_are_right_and_what_was_rejected_is_never_shared(
    overlap: bool, groups: tuple[KVGroup, ...]
) -> None:
    bench = make(*groups, overlap=overlap, num_blocks=9, max_num_seqs=3)
    requests = [fake_request(str(n), range(8 * (n % 2), 8 * (n % 2) + 8), max_tokens=20) for n in range(6)]
    bench.run(*requests)
    assert_right(bench, *requests)
    if FULL in groups:
        assert bench.scheduler.stats().num_preemptions > 0
    longer = [
        fake_request(f"longer {n}", range(8 * n, 8 * n + 8), bench.tokens(str(n))[:9], 5, max_tokens=9)
        for n in range(2)
    ]
    bench.run(*longer)
    assert_right(bench, *longer)


def test_who_is_preempted_while_its_drafts_are_checked_starts_anew_without_drafts() -> None:
    preempted_in_flight = 0
    for length in range(4, 12):
        bench = make(num_blocks=8, max_num_seqs=2, most=3, overlap=True)
        one = fake_request("1", range(length), max_tokens=26 - length)
        two = fake_request("2", range(20, 28), max_tokens=18)
        bench.add(one)
        bench.step()
        # From now on they take turns: one is planned while the other is in flight.
        bench.add(two)
        for _ in range(200):
            flight, before = bench.flight, bench.scheduler.stats().num_preemptions
            rows = {} if flight is None else bench.scheduler.request_ids(flight)
            plan = bench.step()
            if flight is not None and plan is not None and bench.scheduler.stats().num_preemptions > before:
                checked = {rows[piece.row] for piece in flight.slices if piece.token_ids}
                preempted_in_flight += "2" in checked and plan.released != ()
            if not bench.scheduler.has_work and bench.flight is None:
                break
        assert_right(bench, one, two)
    assert preempted_in_flight > 0


def test_drafts_take_no_more_than_budget_blocks_and_length_allow() -> None:
    bench = make(max_num_batched_tokens=6, max_num_seqs=3, max_model_len=20)
    requests = [fake_request(str(n), range(n, n + 6), max_tokens=40) for n in range(3)]
    bench.run(*requests)
    assert_right(bench, *requests)
    assert {len(p.token_ids) for p in slices(bench)} >= {0, 2, 4, 5}
    assert max(p.stop for p in slices(bench)) <= 19


def test_an_answer_with_a_logits_processor_checks_no_drafts_and_its_mates_do() -> None:
    bench = make()
    alone = fake_request("1", range(5), max_tokens=9, processors=(lambda ids, logits: logits,))
    mate = fake_request("2", range(7), fake_item("cat", 5), 3, max_tokens=9)
    bench.run(alone, mate)
    assert_right(bench, alone, mate)
    assert [len(event.token_ids) for event in bench.events["1"]] == [1] * 9
    assert [len(event.token_ids) for event in bench.events["2"]] == [1, 3, 3, 2]


def test_a_row_that_breaks_behind_right_drafts_gives_the_tokens_before() -> None:
    plain = fake_request("1", range(5), max_tokens=12)
    tokens, _ = expected_tokens(plain, 256)
    bench = make()
    bench.runner.broken_tokens = {tokens[2]}
    assert tokens[2] not in tokens[:2]
    bench.run(plain)
    assert bench.tokens("1") == tokens[:3]
    assert bench.last("1").finish is FinishReason.ERROR
    assert "NaN" in str(bench.last("1").error)
    bench.runner.broken_tokens = set()
    again = fake_request("2", range(5), tokens[:8], max_tokens=2)
    bench.run(again)
    assert_right(bench, again)


def test_a_group_that_cannot_take_positions_back_checks_no_drafts() -> None:
    bench = make(FULL, RECURRENT)
    request = fake_request("1", range(5), max_tokens=9)
    bench.run(request)
    assert_right(bench, request)
    assert {piece.wanted for piece in slices(bench)} == {1}
