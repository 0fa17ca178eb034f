"""Blocks that are kept outside of the engine: what is asked for, loaded, kept, and what a missing one means."""

from __future__ import annotations

import pytest

from beheld.core.errors import StepError
from beheld.core.request import FinishReason
from tests.fake_store import FakeStore
from tests.fakes import FULL, LATENT, expected_tokens, fake_config, fake_info, fake_item, fake_request
from tests.scheduler.drive import Bench

PROMPT = [*range(10, 31)]


def bench(store: FakeStore, **changes: object) -> Bench:
    groups = changes.pop("groups", (FULL,))
    blocks = changes.pop("num_blocks", 512)
    return Bench(fake_config(**changes), fake_info(*groups), blocks, store=store)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, LATENT)])
@pytest.mark.parametrize("overlap", [False, True])
def test_another_engine_computes_only_the_rest(groups: tuple[object, ...], overlap: bool) -> None:
    store = FakeStore()
    first = bench(store, groups=groups, overlap=overlap)
    first.run(fake_request("a", PROMPT, max_tokens=6))
    assert len(store.held) == len(PROMPT) // 4
    second = bench(store, groups=groups, overlap=overlap)
    again = fake_request("b", PROMPT, max_tokens=6)
    second.run(again)
    assert second.tokens("b") == first.tokens("a") == expected_tokens(again, 256)[0]
    event = second.events["b"][0]
    assert (event.num_cached, event.num_external) == (20, 20)
    assert sum(piece.stop - piece.start for piece in second.plans[0].slices) == 1
    # Nothing that is there already comes back.
    assert not any(plan.keep for plan in second.plans)
    stats = second.scheduler.stats()
    assert (stats.prefix_hits, stats.external_queries, stats.external_hits) == (0, 21, 20)


def test_at_least_one_position_is_computed() -> None:
    store = FakeStore()
    bench(store).run(fake_request("a", range(10, 30), max_tokens=2))
    assert len(store.held) == 5
    second = bench(store)
    second.run(fake_request("b", range(10, 30), max_tokens=2))
    assert second.events["b"][0].num_external == 16


def test_what_the_prefix_cache_has_is_not_asked_for() -> None:
    store = FakeStore()
    bench(store).run(fake_request("a", PROMPT, max_tokens=2))
    second = bench(store)
    second.run(fake_request("b", PROMPT[:9], max_tokens=2))
    second.run(fake_request("c", PROMPT, max_tokens=2))
    event = second.events["c"][0]
    assert (event.num_cached, event.num_external) == (20, 12)
    assert [len(reading.keys) for reading in store.readings] == [3]


def test_a_block_that_is_gone_ends_what_is_taken() -> None:
    store = FakeStore()
    bench(store).run(fake_request("a", PROMPT, max_tokens=2))
    del store.held[[*store.held][2]]
    second = bench(store)
    again = fake_request("b", PROMPT, max_tokens=2)
    second.run(again)
    assert second.tokens("b") == expected_tokens(again, 256)[0]
    assert second.events["b"][0].num_external == 8
    # The missing one is there again.
    assert len(store.held) == 5


@pytest.mark.parametrize("fails", [False, True])
def test_a_bad_block_is_computed_or_fails_its_request_alone(fails: bool) -> None:
    store = FakeStore()
    bench(store).run(fake_request("a", PROMPT, max_tokens=2))
    store.bad.add([*store.held][1])
    store.fails = fails
    second = bench(store)
    again, other = fake_request("b", PROMPT, max_tokens=2), fake_request("c", range(40, 60), max_tokens=2)
    second.run(again, other)
    assert second.tokens("c") == expected_tokens(other, 256)[0]
    if not fails:
        assert second.tokens("b") == expected_tokens(again, 256)[0]
        return
    event = second.last("b")
    assert event.finish is FinishReason.ERROR
    assert isinstance(event.error, StepError)
    assert "a bad block" in str(event.error)


def test_others_pass_a_sequence_that_waits_for_its_blocks() -> None:
    store = FakeStore()
    store.at_once = False
    bench_ = bench(store)
    bench_.add(fake_request("a", PROMPT, max_tokens=2))
    assert bench_.step() is None
    assert bench_.scheduler.has_work
    # Too short to have a block.
    bench_.add(fake_request("b", [5, 6, 7], max_tokens=2))
    assert bench_.step() is not None
    assert bench_.tokens("b")
    store.finish()
    bench_.run()
    assert bench_.last("a").finish is FinishReason.LENGTH


def test_a_sequence_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beheld.scheduler.outside.PATIENCE_S", 0.0)
    store = FakeStore()
    store.at_once = False
    bench_ = bench(store)
    bench_.run(fake_request("a", PROMPT, max_tokens=2))
    assert bench_.last("a").finish is FinishReason.LENGTH
    assert not any(reading.held for reading in store.readings)


def test_as_many_are_read_ahead_as_there_is_room_for() -> None:
    store = FakeStore(most=2)
    store.at_once = False
    bench_ = bench(store)
    requests = [fake_request(f"r{i}", range(30 + i, 50 + i), max_tokens=2) for i in range(6)]
    bench_.add(*requests)
    assert bench_.step() is None
    assert len(store.readings) == 2
    store.at_once = True
    bench_.run()
    for request in requests:
        assert bench_.tokens(request.id) == expected_tokens(request, 256)[0]


def test_chunks_and_preemption_keep_every_block_once() -> None:
    store = FakeStore()
    first = bench(store, max_num_batched_tokens=9, num_blocks=14)
    requests = [fake_request(f"r{i}", range(10 + i, 34 + i), max_tokens=14) for i in range(3)]
    first.run(*requests)
    assert first.scheduler.stats().num_preemptions > 0
    blocks = [(keep.row, keep.first, len(keep.blocks[0])) for plan in first.plans for keep in plan.keep]
    assert sum(count for _, _, count in blocks) == 18 == len(store.held)
    second = bench(store, max_num_batched_tokens=9, num_blocks=14)
    second.run(*requests)
    assert second.scheduler.stats().num_preemptions > 0
    for request in requests:
        assert second.tokens(request.id) == first.tokens(request.id) == expected_tokens(request, 256)[0]
        assert second.events[request.id][0].num_external == 20


def test_a_range_that_one_step_computes_is_not_cut() -> None:
    store = FakeStore()
    picture = fake_item("cat", 9)
    config, info = fake_config(), fake_info(FULL, atomic_spans=True)
    first = Bench(config, info, store=store)
    first.run(fake_request("a", [3] * 6, picture, [5] * 6, max_tokens=2))
    for key in [*store.held][3:]:
        del store.held[key]
    second = Bench(config, info, store=store)
    again = fake_request("b", [3] * 6, picture, [5] * 6, max_tokens=2)
    second.run(again)
    # Three blocks are there, 12 positions; the picture begins at 6.
    assert second.events["b"][0].num_external == 4
    assert second.tokens("b") == expected_tokens(again, 256)[0]


def test_what_failed_is_not_kept() -> None:
    store = FakeStore()
    first = bench(store, max_num_batched_tokens=8)
    first.runner.broken_tokens = {96}
    first.run(fake_request("a", [*range(10, 20), 96, *range(20, 30)], max_tokens=2))
    assert first.last("a").finish is FinishReason.ERROR
    assert not store.held


def test_other_weights_make_what_was_read_worthless() -> None:
    store = FakeStore()
    bench(store).run(fake_request("a", PROMPT, max_tokens=2))
    store.at_once = False
    second = bench(store)
    second.add(fake_request("b", PROMPT, max_tokens=2))
    assert second.step() is None
    store.finish()
    second.scheduler.clear_prefix_cache()
    second.run()
    assert second.events["b"][0].num_external == 0


def test_a_prefix_that_was_computed_meanwhile_comes_from_the_cache() -> None:
    store = FakeStore()
    bench(store).run(fake_request("a", PROMPT, max_tokens=2))
    store.at_once = False
    second = bench(store)
    again = fake_request("b", PROMPT, max_tokens=2)
    second.add(again)
    assert second.step() is None
    second.add(fake_request("c", PROMPT[:9], max_tokens=2, prompt_logprobs=1))
    second.step()
    store.finish()
    second.run()
    assert second.tokens("b") == expected_tokens(again, 256)[0]
    assert (second.events["b"][0].num_cached, second.events["b"][0].num_external) == (20, 12)


def test_not_all_that_wait_are_hashed_at_once() -> None:
    store = FakeStore(most=2)
    store.at_once = False
    bench_ = bench(store)
    requests = [fake_request(f"r{i}", [*range(3, 20), 3 + i % 80, i % 7], max_tokens=1) for i in range(200)]
    bench_.add(*requests)
    assert bench_.step() is None
    assert sum(bool(s.block_keys) for s in bench_.scheduler._sequences.values()) < 80
    store.at_once = True
    bench_.run()
    for request in requests:
        assert bench_.tokens(request.id) == expected_tokens(request, 256)[0]


def test_a_better_priority_does_not_keep_those_waiting_that_have_their_blocks() -> None:
    """The room for reading is theirs until they are admitted."""
    store = FakeStore(most=1)
    store.at_once = False
    bench_ = bench(store, policy="priority", max_num_seqs=1)
    bench_.add(fake_request("a", PROMPT, max_tokens=2, priority=1))
    assert bench_.step() is None
    store.finish()
    bench_.add(fake_request("b", range(40, 60), max_tokens=2, priority=0))
    bench_.step()
    store.at_once = True
    bench_.run()
    assert bench_.tokens("a")
    assert bench_.tokens("b")


def test_what_is_in_flight_when_a_sequence_fails_is_not_kept_either() -> None:
    store, bad = FakeStore(), fake_item("bad", 4)
    first = bench(store, max_num_batched_tokens=8, overlap=True)
    first.runner.broken_digests = {bad.digest}
    first.run(fake_request("a", [3, 4], bad, range(20, 50), max_tokens=2))
    assert first.last("a").finish is FinishReason.ERROR
    assert any(keep.first for plan in first.plans for keep in plan.keep), "a later part was under way"
    assert not store.held
