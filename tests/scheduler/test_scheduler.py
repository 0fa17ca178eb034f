"""The scheduler's promises, one by one, on the fake device that verifies every plan."""

from __future__ import annotations

import pytest

from beheld.core.config import KVGroup
from beheld.core.errors import CapacityError, ParamsError, PromptError, PromptTooLongError, StepError
from beheld.core.plan import StepResult
from beheld.core.request import FinishReason, Request
from tests.fakes import (
    CROSS,
    FULL,
    PLACEHOLDER,
    expected_tokens,
    fake_config,
    fake_info,
    fake_item,
    fake_request,
    sliding,
)
from tests.scheduler.drive import Bench

CAT = fake_item("cat", 6)
DOG = fake_item("dog", 6)


def assert_right(bench: Bench, *requests: Request) -> None:
    for request in requests:
        tokens, reason = expected_tokens(request, bench.config.max_model_len)
        assert bench.tokens(request.id) == tokens, request.id
        assert bench.last(request.id).finish == reason


def slices(bench: Bench) -> list[list[tuple[int, int]]]:
    """For each plan, (start, stop) of its slices in order."""
    return [[(s.start, s.stop) for s in plan.slices] for plan in bench.plans]


# ---- the token budget ------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_by_the_budget_and_decoding_goes_on_beside_it() -> None:
    bench = Bench(fake_config(max_num_batched_tokens=10, prefix_caching=False), fake_info())
    short, long = fake_request("s", range(4), max_tokens=6), fake_request("l", range(25), max_tokens=2)
    bench.run(short, long)
    assert slices(bench)[:5] == [
        [(0, 4), (0, 6)],
        [(4, 5), (6, 15)],
        [(5, 6), (15, 24)],
        [(6, 7), (24, 25)],
        [(7, 8), (25, 26)],
    ]
    assert_right(bench, short, long)


def test_a_picture_may_be_cut_in_two_and_is_encoded_once() -> None:
    bench = Bench(fake_config(max_num_batched_tokens=5, prefix_caching=False), fake_info())
    request = fake_request("1", 3, CAT, 4, max_tokens=3)
    bench.run(request)
    assert slices(bench)[:2] == [[(0, 5)], [(5, 8)]]
    assert [len(plan.encode) for plan in bench.plans[:2]] == [1, 0]
    assert_right(bench, request)


def test_a_model_that_needs_whole_spans_gets_them_whole() -> None:
    bench = Bench(fake_config(max_num_batched_tokens=8, prefix_caching=False), fake_info(atomic_spans=True))
    request = fake_request("1", 3, 4, 5, CAT, 4, DOG, 5, max_tokens=2)
    bench.run(request)
    assert slices(bench)[:3] == [[(0, 3)], [(3, 10)], [(10, 17)]]
    assert_right(bench, request)


def test_media_that_see_each_other_are_computed_in_one_step_with_what_stands_between() -> None:
    info = fake_info(both_ways="joint", joint_ids=frozenset((PLACEHOLDER,)))
    bench = Bench(fake_config(max_num_batched_tokens=16), info)
    request = fake_request("1", range(3, 8), CAT, 4, DOG, range(10, 18), max_tokens=2)
    bench.run(request)
    assert slices(bench)[:3] == [[(0, 5)], [(5, 21)], [(21, 26)]]
    again = fake_request("2", range(3, 8), CAT, 4, DOG, 10, 11, 12, max_tokens=2)
    bench.run(again)
    # A hit ends before the first or behind the last.
    assert bench.events["2"][0].num_cached == 20
    fewer = fake_request("3", range(3, 8), CAT, 4, 5, 6, max_tokens=2)
    bench.run(fewer)
    assert bench.events["3"][0].num_cached == 4
    assert_right(bench, request, again, fewer)
    with pytest.raises(PromptTooLongError, match="17 tokens"):
        bench.scheduler.add(fake_request("4", CAT, range(3, 8), DOG))
    few = Bench(fake_config(max_encoder_tokens=8), info)
    with pytest.raises(CapacityError, match="12 embeddings"):
        few.scheduler.add(fake_request("1", CAT, DOG))


def test_without_chunks_a_prompt_is_computed_whole_or_waits() -> None:
    bench = Bench(fake_config(max_num_batched_tokens=20, chunked_prefill=False), fake_info())
    one, two = fake_request("1", range(12)), fake_request("2", range(20, 32))
    bench.run(one, two)
    assert slices(bench)[:2] == [[(0, 12)], [(12, 13), (0, 12)]]
    with pytest.raises(PromptTooLongError, match="max_num_batched_tokens"):
        bench.scheduler.add(fake_request("3", range(21)))


def test_first_come_first_served_and_rows_are_the_limit() -> None:
    bench = Bench(fake_config(max_num_seqs=2), fake_info())
    requests = [fake_request(str(n), n, 5, max_tokens=3) for n in range(5)]
    bench.add(*requests)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 3)
    bench.run()
    admitted = [a.token_ids[0] for plan in bench.plans for a in plan.admitted]
    assert admitted == [0, 1, 2, 3, 4]
    assert_right(bench, *requests)


def test_priority_then_arrival() -> None:
    bench = Bench(fake_config(max_num_seqs=1, policy="priority"), fake_info())
    bench.run(
        fake_request("a", 10, priority=2, arrival=1.0),
        fake_request("b", 11, priority=1, arrival=3.0),
        fake_request("c", 12, priority=1, arrival=2.0),
    )
    assert [a.token_ids[0] for plan in bench.plans for a in plan.admitted] == [12, 11, 10]


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_stop_ids_max_tokens_and_max_model_len() -> None:
    free = fake_request("free", range(8), max_tokens=9)
    tokens, _ = expected_tokens(free, 256)
    own = fake_request("own", range(8), max_tokens=9, stop_ids={tokens[3]}, own_stop_ids={tokens[3]})
    eos = fake_request("eos", range(8), max_tokens=9, stop_ids=frozenset({tokens[3]}))
    late = fake_request("late", range(8), max_tokens=9, min_tokens=5, stop_ids=frozenset({tokens[3]}))
    long = fake_request("long", range(8), max_tokens=400)
    bench = Bench(fake_config(max_model_len=30), fake_info())
    bench.run(free, own, eos, late, long)
    assert_right(bench, free, own, eos, late, long)
    assert bench.last("own").stop_id == tokens[3]
    assert (bench.last("eos").finish, bench.last("eos").stop_id) == (FinishReason.STOP, None)
    assert len(bench.tokens("late")) > 4
    assert len(bench.tokens("long")) == 22


def test_nothing_is_scheduled_beyond_the_last_token() -> None:
    for overlap in (False, True):
        bench = Bench(fake_config(overlap=overlap, max_model_len=12), fake_info())
        bench.run(fake_request("1", range(4), max_tokens=3), fake_request("2", range(30, 34), max_tokens=99))
        assert max(s.stop for plan in bench.plans for s in plan.slices) == 11
        assert bench.runner.num_computed == 6 + 11


def test_with_overlap_a_stop_costs_one_row_of_one_step_and_the_row_is_reused() -> None:
    tokens, _ = expected_tokens(fake_request("x", range(5), max_tokens=9), 256)
    first = fake_request("1", range(5), max_tokens=9, stop_ids=frozenset({tokens[2]}))
    second = fake_request("2", range(40, 46), max_tokens=4)
    bench = Bench(fake_config(overlap=True, max_num_seqs=1), fake_info())
    bench.run(first, second)
    assert_right(bench, first, second)
    assert slices(bench)[:5] == [[(0, 5)], [(5, 6)], [(6, 7)], [(7, 8)], [(0, 6)]]
    swap = bench.plans[4]
    assert swap.released == (0,)
    assert [a.row for a in swap.admitted] == [0]


def test_abort_and_stop_in_every_state() -> None:
    bench = Bench(fake_config(overlap=True, max_num_seqs=1), fake_info())
    scheduler = bench.scheduler
    bench.add(*(fake_request(name, range(6)) for name in ("run", "wait", "stop")))
    bench.step()
    event = scheduler.abort("run")
    assert event is not None
    assert (event.finish, event.token_ids) == (FinishReason.ABORT, ())
    scheduler.stop("stop")
    assert scheduler.all_request_ids() == ["wait"]
    bench.run()
    assert bench.events["run"] == bench.events["stop"] == []
    assert len(bench.tokens("wait")) == 16
    assert scheduler.abort("wait") is None
    scheduler.stop("never")


def test_rows_of_a_plan_name_their_requests() -> None:
    scheduler = Bench(fake_config(), fake_info()).scheduler
    scheduler.add(fake_request("a", 5))
    scheduler.add(fake_request("b", 6))
    plan = scheduler.schedule()
    assert plan is not None
    rows = scheduler.request_ids(plan)
    assert [rows[piece.row] for piece in plan.slices] == ["a", "b"]
    scheduler.abort("a")
    assert scheduler.request_ids(plan) == rows


# ---- what can never run ----------------------------------------------------------------------------------------------


def test_what_can_never_run_is_refused() -> None:
    bench = Bench(fake_config(max_encoder_tokens=8), fake_info(), num_blocks=6)
    add = bench.scheduler.add
    with pytest.raises(PromptError, match="empty"):
        add(fake_request("1"))
    with pytest.raises(PromptTooLongError, match="255"):
        add(fake_request("1", range(256)))
    with pytest.raises(CapacityError, match="holds 20"):
        add(fake_request("1", range(21)))
    with pytest.raises(CapacityError, match=r"image 2: .*9 embeddings"):
        add(fake_request("1", CAT, fake_item("large", 9)))
    add(fake_request("1", range(20)))
    with pytest.raises(ParamsError, match="'1'"):
        add(fake_request("1", 5))
    atomic = Bench(fake_config(max_num_batched_tokens=5), fake_info(atomic_spans=True))
    with pytest.raises(PromptTooLongError, match="image 1"):
        atomic.scheduler.add(fake_request("1", CAT))
    tight = Bench(fake_config(), fake_info(sliding(9)), num_blocks=3)
    with pytest.raises(CapacityError, match="too small"):
        tight.scheduler.add(fake_request("1", range(20)))
    whole = Bench(fake_config(chunked_prefill=False, max_encoder_tokens=8), fake_info())
    with pytest.raises(CapacityError, match="12 embeddings"):
        whole.scheduler.add(fake_request("1", CAT, DOG))


EAST, WEST, NORTH = (fake_item(name, 1, num_states=6) for name in ("east", "west", "north"))


def test_states_are_held_from_admission_to_the_end() -> None:
    bench = Bench(fake_config(max_encoder_tokens=12), fake_info(FULL, CROSS))
    requests = [
        fake_request("1", 5, EAST, 6, max_tokens=9),
        fake_request("2", EAST, WEST, 7, max_tokens=3),
        fake_request("3", NORTH, 8, max_tokens=2),
        fake_request("4", 9, max_tokens=2),
    ]
    bench.add(*requests)
    plan = bench.step()
    assert plan is not None
    assert [item.num_embeds for item in plan.encode] == [6, 6]
    # The third finds no room, and nobody behind it overtakes, not even one without pictures.
    assert len(plan.slices) == 2
    assert bench.scheduler.num_waiting == 2
    bench.run()
    for request in requests:
        assert bench.tokens(request.id) == expected_tokens(request, 256)[0]
    assert bench.runner.num_encoded == 3
    assert bench.scheduler.stats().num_reused == 1


def test_states_come_back_after_a_preemption() -> None:
    bench = Bench(fake_config(max_encoder_tokens=12), fake_info(FULL, CROSS), num_blocks=9)
    requests = [fake_request(str(n), 1, item, range(6), max_tokens=16) for n, item in enumerate((EAST, WEST))]
    bench.run(*requests)
    assert bench.scheduler.stats().num_preemptions > 0
    for request in requests:
        assert bench.tokens(request.id) == expected_tokens(request, 256)[0]


def test_states_that_can_never_be_there_at_once_are_refused() -> None:
    bench = Bench(fake_config(max_encoder_tokens=12), fake_info(FULL, CROSS))
    with pytest.raises(CapacityError, match=r"18 states.*at most 12"):
        bench.scheduler.add(fake_request("1", EAST, WEST, NORTH, 1))
    bench.run(fake_request("2", EAST, WEST, EAST, WEST, 1, max_tokens=2))
    assert len(bench.tokens("2")) == 2


def test_a_tower_that_fails_takes_only_those_who_need_its_states() -> None:
    bench = Bench(fake_config(overlap=True), fake_info(FULL, CROSS))
    bench.runner.broken_digests = {WEST.digest}
    requests = [fake_request(str(n), *parts, max_tokens=4) for n, parts in enumerate([(WEST, 1), (EAST, 2), (WEST, 3)])]
    bench.run(*requests)
    assert isinstance(bench.last("0").error, StepError)
    assert isinstance(bench.last("2").error, StepError)
    assert bench.tokens("1") == expected_tokens(requests[1], 256)[0]


def test_an_answer_that_outgrows_the_cache_alone_ends_with_an_error_that_says_so() -> None:
    bench = Bench(fake_config(), fake_info(), num_blocks=4)
    request = fake_request("1", range(8), max_tokens=50)
    bench.run(request)
    assert bench.tokens("1") == expected_tokens(request, 256)[0][:5]
    assert bench.last("1").token_ids == ()
    assert isinstance(bench.last("1").error, CapacityError)
    assert "12 tokens" in str(bench.last("1").error)


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def test_the_same_prompt_again_computes_only_its_last_tokens() -> None:
    bench = Bench(fake_config(), fake_info())
    one = fake_request("1", range(3), CAT, range(7), max_tokens=3)
    two = fake_request("2", range(3), CAT, range(7), max_tokens=3)
    bench.run(one)
    bench.run(two)
    assert_right(bench, one, two)
    assert bench.events["1"][0].num_cached == 0
    assert bench.events["2"][0].num_cached == 12
    assert bench.events["2"][1].num_cached == 0
    assert (bench.scheduler.stats().prefix_queries, bench.scheduler.stats().prefix_hits) == (32, 12)
    assert bench.runner.num_encoded == 1


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    bench = Bench(fake_config(), fake_info())
    one, two = fake_request("1", range(8), max_tokens=6), fake_request("2", range(8), max_tokens=6)
    bench.run(one)
    bench.run(two)
    assert bench.events["2"][0].num_cached == 4
    assert_right(bench, one, two)


def test_the_answer_is_cached_too() -> None:
    bench = Bench(fake_config(), fake_info())
    one = fake_request("1", range(8), max_tokens=9)
    bench.run(one)
    more = fake_request("2", range(8), bench.tokens("1"), 5)
    bench.run(more)
    assert bench.events["2"][0].num_cached == 16
    assert_right(bench, more)


def test_another_picture_with_the_same_text_is_not_a_hit_beyond_the_picture() -> None:
    bench = Bench(fake_config(), fake_info())
    one, two = fake_request("1", range(4), CAT, range(6)), fake_request("2", range(4), DOG, range(6))
    bench.run(one)
    bench.run(two)
    assert bench.events["2"][0].num_cached == 4
    assert_right(bench, one, two)


def test_a_hit_may_end_inside_a_picture_but_not_of_a_model_that_needs_it_whole() -> None:
    for atomic, cached in ((False, 8), (True, 0)):
        bench = Bench(fake_config(), fake_info(atomic_spans=atomic))
        one, two = fake_request("1", 3, fake_item("p", 9), 5, 6, 7), fake_request("2", 3, fake_item("p", 9), 8)
        bench.run(one)
        bench.run(two)
        assert bench.events["2"][0].num_cached == cached
        assert_right(bench, one, two)


@pytest.mark.parametrize("shared", range(0, 40, 3))
def test_what_is_unseen_is_what_no_prefix_has(shared: int) -> None:
    """Looked for piece by piece: keys that are of no use yet are not computed."""
    bench = Bench(fake_config(), fake_info())
    size = bench.config.block_size
    bench.run(fake_request("1", range(40 * size)))
    bench.add(fake_request("2", range(shared * size), range(900, 900 + (40 - shared) * size), 1))
    assert bench.scheduler.num_unseen("2") == (40 - shared) * size + 1
    assert shared <= len(bench.scheduler._sequences["2"].block_keys) <= 2 * shared + 1
    bench.run()
    assert bench.events["2"][0].num_cached == shared * size


def test_salt_separates_and_clearing_forgets() -> None:
    bench = Bench(fake_config(), fake_info())
    bench.run(fake_request("1", range(9)))
    bench.run(fake_request("2", range(9), salt=b"other"))
    assert bench.events["2"][0].num_cached == 0
    bench.run(fake_request("3", range(9)))
    assert bench.events["3"][0].num_cached == 8
    bench.scheduler.clear_prefix_cache()
    bench.run(fake_request("4", range(9)))
    assert bench.events["4"][0].num_cached == 0


def test_equal_prompts_in_one_batch_are_right() -> None:
    for overlap in (False, True):
        bench = Bench(fake_config(overlap=overlap, max_num_batched_tokens=100), fake_info(FULL, sliding(5)))
        requests = [fake_request(str(n), range(3), CAT, range(9), max_tokens=7) for n in range(6)]
        bench.run(*requests)
        assert_right(bench, *requests)
        assert bench.runner.num_encoded == 1


def test_the_head_of_a_prefix_outlives_its_tail() -> None:
    bench = Bench(fake_config(), fake_info(), num_blocks=9)
    bench.run(fake_request("1", range(17), max_tokens=1))
    bench.run(fake_request("2", range(40, 57), max_tokens=1))
    bench.run(fake_request("3", range(17), max_tokens=1))
    assert bench.events["3"][0].num_cached == 12


def test_prompt_logprobs_need_every_position_and_come_once() -> None:
    bench = Bench(fake_config(max_num_batched_tokens=5), fake_info())
    bench.run(fake_request("1", range(12)))
    asked = fake_request("2", range(12), prompt_logprobs=0, logprobs=0, max_tokens=3)
    bench.run(asked)
    first, *later = bench.events["2"]
    assert first.num_cached == 0
    assert first.prompt_logprobs is not None
    assert [one.token_id for one in first.prompt_logprobs] == list(range(1, 12))
    assert all(event.prompt_logprobs is None for event in later)
    assert [entry.token_id for event in bench.events["2"] for entry in event.logprobs] == bench.tokens("2")


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_a_sliding_group_lives_on_a_few_blocks() -> None:
    for window in (1, 4, 5, 8, 9):
        least = (window - 2) // 4 + 2 if window > 1 else 1
        bench = Bench(fake_config(), fake_info(sliding(window)), num_blocks=least + 1)
        request = fake_request("1", range(30), max_tokens=60)
        bench.run(request)
        assert_right(bench, request)


@pytest.mark.parametrize("num_blocks", [(64, 10), (10, 64)])
def test_a_hit_is_as_long_as_the_shortest_of_groups_that_keep_everything(num_blocks: tuple[int, int]) -> None:
    """The small pool has given some blocks to another sequence; the large one has them all."""
    bench = Bench(fake_config(), fake_info(FULL, FULL), num_blocks=num_blocks)
    one, two = fake_request("1", range(25), max_tokens=1), fake_request("3", range(25), max_tokens=4)
    other = fake_request("2", range(50, 60))
    for request in (one, other, two):
        bench.run(request)
    first, second = next(p for p in reversed(bench.plans) if p.admitted).admitted[0].blocks
    assert 0 < len(first) == len(second) < 6
    assert_right(bench, one, other, two)


def test_a_hit_brings_only_the_window_of_a_sliding_group() -> None:
    bench = Bench(fake_config(), fake_info(FULL, sliding(6), CROSS))
    one, two = fake_request("1", range(25)), fake_request("2", range(25))
    bench.run(one)
    bench.run(two)
    full, slid, cross = next(p for p in reversed(bench.plans) if p.admitted).admitted[0].blocks
    assert cross == ()
    assert len(full) == 6
    assert all(full)
    assert [block != 0 for block in slid] == [False, False, False, False, True, True]
    assert_right(bench, one, two)


# ---- embeddings ------------------------------------------------------------------------------------------------------


def test_without_room_the_slice_ends_before_the_picture_and_the_sequence_goes_on_later() -> None:
    bench = Bench(fake_config(max_encoder_tokens=8, prefix_caching=False), fake_info())
    request = fake_request("1", 3, CAT, 4, DOG, 5, max_tokens=2)
    bench.run(request)
    assert slices(bench)[:2] == [[(0, 8)], [(8, 15)]]
    assert bench.plans[1].forget == (CAT.digest,)
    assert_right(bench, request)


def test_the_same_pictures_around_another_do_not_block_each_other() -> None:
    bench = Bench(fake_config(max_encoder_tokens=8, prefix_caching=False), fake_info())
    request = fake_request("1", CAT, DOG, CAT, DOG, 5, max_tokens=2)
    other = fake_request("2", DOG, CAT, DOG, CAT, 5, max_tokens=2)
    bench.run(request, other)
    assert_right(bench, request, other)


def test_an_item_on_the_device_is_used_before_another_takes_its_room() -> None:
    bench = Bench(fake_config(max_encoder_tokens=12, prefix_caching=False, max_num_batched_tokens=64), fake_info())
    third = fake_item("third", 6)
    for request in (fake_request("1", CAT, 5), fake_request("2", DOG, 5), fake_request("3", third, CAT, 5)):
        bench.run(request)
        assert_right(bench, request)
    # The third request found DOG and CAT there. CAT is the older, yet DOG had to go.
    assert bench.runner.num_encoded == 3
    assert bench.plans[-16].forget == (DOG.digest,)


def test_nobody_takes_room_from_one_who_waits_for_it() -> None:
    config = fake_config(max_encoder_tokens=32, max_num_batched_tokens=12, prefix_caching=False)
    bench = Bench(config, fake_info())
    early, large = fake_item("early", 15), fake_item("large", 32)
    small = [fake_item(f"small {number}", 7) for number in range(5)]
    bench.run(
        fake_request("holds", early, 5, max_tokens=1),
        fake_request("waits", 7, large, 5, max_tokens=1),
        # Each step of it ends inside a picture, so that, left to itself, it would always hold one.
        fake_request("greedy", 9, *small, 5, max_tokens=1),
    )
    assert slices(bench)[1] == [(12, 16), (0, 1), (0, 1)]
    order = [item.digest for plan in bench.plans for item in plan.encode]
    assert order[:3] == [early.digest, large.digest, small[0].digest]


def test_who_came_first_gets_its_picture_first() -> None:
    large = fake_item("large", 8)
    bench = Bench(fake_config(max_encoder_tokens=8, max_num_batched_tokens=6, prefix_caching=False), fake_info())
    crowd = [fake_request(str(n), 9, fake_item(f"small {n}", 4), 5, max_tokens=1) for n in range(6)]
    first, waits = fake_request("first", CAT, 5, max_tokens=1), fake_request("waits", 7, 8, large, 5, max_tokens=1)
    bench.run(first, waits, *crowd)
    assert_right(bench, first, waits, *crowd)
    assert [item.digest for plan in bench.plans for item in plan.encode][1] == large.digest


def test_a_picture_whose_tower_fails_hurts_only_those_who_show_it() -> None:
    for overlap in (False, True):
        bench = Bench(fake_config(overlap=overlap, max_num_batched_tokens=4, prefix_caching=False), fake_info())
        bench.runner.broken_digests = {CAT.digest}
        bad, good = fake_request("bad", 3, CAT, 4), fake_request("good", 3, DOG, 4)
        bench.run(bad, good)
        assert isinstance(bench.last("bad").error, StepError)
        assert_right(bench, good)
        bench.runner.broken_digests = set()
        again = fake_request("again", 3, CAT, 4)
        bench.run(again)
        assert_right(bench, again)


# ---- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_the_last_one_gives_way_and_resumes_before_those_who_wait(overlap: bool, caching: bool) -> None:
    config = fake_config(overlap=overlap, prefix_caching=caching, max_num_seqs=2)
    bench = Bench(config, fake_info(), num_blocks=9)
    requests = [fake_request(str(n), range(n * 10, n * 10 + 8), max_tokens=14) for n in range(3)]
    bench.run(*requests)
    assert bench.scheduler.stats().num_preemptions > 0
    assert_right(bench, *requests)
    admitted = [a.token_ids[0] for plan in bench.plans for a in plan.admitted]
    assert admitted[:3] == [0, 10, 10]
    assert admitted == sorted(admitted)
    resumed = next(a for plan in bench.plans[1:] for a in plan.admitted)
    assert resumed.num_prompt == 8
    assert len(resumed.token_ids) > 8


@pytest.mark.parametrize("groups", [(FULL,), (sliding(9),), (FULL, sliding(9))])
def test_nobody_is_admitted_only_to_be_preempted_at_once(groups: tuple[KVGroup, ...]) -> None:
    bench = Bench(fake_config(max_num_batched_tokens=12, prefix_caching=False), fake_info(*groups), num_blocks=8)
    requests = [fake_request(str(n), range(n * 10, n * 10 + 10), max_tokens=8) for n in range(4)]
    bench.run(*requests)
    assert_right(bench, *requests)
    # Each needs three blocks, and five at its end if all are kept; there are seven. So each but the first may have to
    # give way once, when another grows; nobody is admitted into less than it needs.
    assert bench.scheduler.stats().num_preemptions == (3 if FULL in groups else 0)


def test_the_least_important_gives_way_even_if_it_came_first() -> None:
    bench = Bench(fake_config(policy="priority", max_num_seqs=2), fake_info(), num_blocks=9)
    low, high = (
        fake_request("low", range(8), max_tokens=14, priority=5),
        fake_request("high", range(20, 28), max_tokens=14),
    )
    bench.add(low)
    bench.step()
    bench.run(high)
    assert_right(bench, low, high)
    assert [a.token_ids[0] for plan in bench.plans for a in plan.admitted][:3] == [0, 20, 0]
    assert len(bench.events["high"]) == 14


def test_one_who_was_preempted_is_not_admitted_before_its_token_has_arrived() -> None:
    bench = Bench(fake_config(max_num_seqs=2), fake_info(), num_blocks=7)
    bench.add(fake_request("1", range(8), max_tokens=14), fake_request("2", range(20, 28), max_tokens=14))
    scheduler = bench.scheduler
    plans = [scheduler.schedule()]
    while scheduler.stats().num_preemptions == 0:
        plans.append(scheduler.schedule())
        assert plans[-1] is not None
    scheduler.abort("1")
    # All blocks are free now, and "2" has tokens in flight that the host does not know.
    assert scheduler.schedule() is None
    for plan in plans:
        assert plan is not None
        scheduler.update(plan, StepResult(plan.id, {piece.row: (7,) for piece in plan.slices if piece.wanted}))
    resumed = scheduler.schedule()
    assert resumed is not None
    assert resumed.admitted[0].token_ids[:8] == tuple(range(20, 28))
    assert set(resumed.admitted[0].token_ids[8:]) == {7}
    scheduler.check()


def test_prompt_logprobs_survive_preemption() -> None:
    bench = Bench(fake_config(max_num_seqs=2, max_num_batched_tokens=6), fake_info(), num_blocks=9)
    one = fake_request("1", range(8), max_tokens=14)
    two = fake_request("2", range(20, 30), max_tokens=14, prompt_logprobs=0)
    bench.run(one, two)
    assert bench.scheduler.stats().num_preemptions > 0
    assert_right(bench, one, two)
    told = bench.events["2"][0].prompt_logprobs
    assert told is not None
    assert [logprob.token_id for logprob in told] == list(range(21, 30))


def test_blocks_and_embeddings_held_crosswise_do_not_lock() -> None:
    for groups in ((FULL,), (sliding(9),), (FULL, sliding(6))):
        config = fake_config(max_encoder_tokens=8, max_num_batched_tokens=5, max_num_seqs=4, overlap=True)
        bench = Bench(config, fake_info(*groups), num_blocks=8)
        requests = [fake_request(str(n), n, CAT, 3, DOG, 4, n, max_tokens=8) for n in range(5)]
        bench.run(*requests)
        assert_right(bench, *requests)


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.case(73)
def test_nan_fails_its_request_alone_and_none_of_its_blocks_is_shared(overlap: bool) -> None:
    bench = Bench(fake_config(overlap=overlap, max_num_batched_tokens=20), fake_info(FULL, sliding(20)))
    bench.runner.broken_tokens = {77}
    bad = fake_request("bad", range(9), 77, range(20))
    mate = fake_request("mate", range(40, 45), max_tokens=5)
    bench.run(bad, mate)
    assert bench.last("bad").finish is FinishReason.ERROR
    assert "NaN" in str(bench.last("bad").error)
    assert_right(bench, mate)
    bench.runner.broken_tokens = set()
    again = fake_request("again", range(9), 77, range(20))
    bench.run(again)
    assert_right(bench, again)
    assert bench.events["again"][0].num_cached == 0


def test_another_reason_is_told_as_it_is() -> None:
    bench = Bench(fake_config(), fake_info())
    bench.add(fake_request("1", range(5)))
    plan = bench.scheduler.schedule()
    assert plan is not None
    (event,) = bench.scheduler.update(plan, StepResult(plan.id, {}, failed={0: "out of memory"}))
    assert str(event.error) == "out of memory"
    assert not bench.scheduler.has_work
