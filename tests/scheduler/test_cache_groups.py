"""Kinds of cache groups side by side: one registry a half, the greatest common hit, and a kind that only tests know."""

from __future__ import annotations

import pytest

from beheld.runner.cache import registry as device
from beheld.scheduler.cache import registry as host
from beheld.scheduler.cache.coordinator import CacheCoordinator
from beheld.scheduler.cache.paged import PagedGroup
from beheld.scheduler.cache.prefix import extend_keys
from beheld.scheduler.sequence import Sequence
from tests import fake_caches
from tests.fakes import (
    CROSS,
    FULL,
    chunked,
    conv,
    expected_tokens,
    fake_config,
    fake_info,
    fake_item,
    fake_request,
    recurrent,
    sliding,
)
from tests.scheduler.drive import Bench
from tests.toy_recurrent import KIND, RECURRENT

SHORT = (5,) * 3


def admitted(bench: Bench) -> tuple[tuple[int, ...], ...]:
    """The blocks that the last admitted sequence found, by group."""
    return next(plan for plan in reversed(bench.plans) if plan.admitted).admitted[0].blocks


def assert_right(bench: Bench, request_id: str, *prompt: object) -> None:
    request = fake_request(request_id, *prompt, max_tokens=4)  # type: ignore[arg-type]
    bench.run(request)
    assert bench.tokens(request_id) == expected_tokens(request, bench.config.max_model_len)[0]


def test_both_halves_know_the_same_kinds() -> None:
    known = {*device.TABLES, *device.STATES} - {KIND}
    assert host.KINDS.keys() - {KIND} == known
    assert fake_caches.KINDS.keys() - {KIND} == known, "the fake device drives every kind"
    assert not device.TABLES.keys() & device.STATES.keys()


def test_a_hit_needs_blocks_and_a_checkpoint_at_the_same_position() -> None:
    """Checkpoints lie after blocks 1, 3 and 5; of a prefix of 5 blocks, 4 can be taken."""
    bench = Bench(fake_config(), fake_info(FULL, RECURRENT))
    assert_right(bench, "1", range(10, 35))
    assert_right(bench, "2", range(10, 35))
    full, recurrent = admitted(bench)
    assert len(full) == len(recurrent) == 6
    assert all(full)
    assert [block != 0 for block in recurrent] == [False] * 5 + [True]
    assert_right(bench, "3", range(10, 32), SHORT)
    full, recurrent = admitted(bench)
    assert len(full) == len(recurrent) == 4
    assert [block != 0 for block in recurrent] == [False] * 3 + [True]
    assert_right(bench, "4", range(10, 17), SHORT)
    assert admitted(bench) == ((), ()), "one block is shared, and the first checkpoint is after two"


def test_the_greatest_common_hit_of_windows_and_a_state() -> None:
    """Blocks that slid out and checkpoints that are missing narrow each other until all agree."""
    bench = Bench(fake_config(max_num_batched_tokens=8), fake_info(sliding(6), RECURRENT, FULL, CROSS))
    assert_right(bench, "1", range(10, 39))
    assert_right(bench, "2", range(10, 39))
    slid, recurrent, full, states = admitted(bench)
    assert len(slid) == len(recurrent) == len(full) > 0
    assert len(full) % 2 == 0, "it ends at a checkpoint"
    assert states == ()


def test_groups_are_asked_until_all_agree() -> None:
    """A window needs blocks 1 and 2 for a hit of 3, blocks 5 and 6 for one of 7; states are there at 3 and 6."""
    coordinator = CacheCoordinator((sliding(6), RECURRENT), (12, 12), 4, caching=True)
    sequence = Sequence.born(fake_request("1", range(10, 39)), (0, 0.0, 0), 2, 99, 99)
    keys = extend_keys(sequence, 7, 4)
    for group, blocks in zip(coordinator.groups, ((1, 2, 5, 6), (2, 5)), strict=True):
        assert isinstance(group, PagedGroup)
        for index in blocks:
            group.pool.set_key(group.pool.allocate(1)[0], keys[index])
    assert coordinator.find_hit(sequence) == 3
    slid, state = coordinator.take_hit(sequence, 3)
    assert [block != 0 for block in slid] == [False, True, True]
    assert [block != 0 for block in state] == [False, False, True]


def test_a_state_lives_on_two_blocks_however_long_it_grows() -> None:
    for num_blocks in (3, 9):
        bench = Bench(fake_config(), fake_info(RECURRENT), num_blocks=num_blocks)
        assert_right(bench, "1", range(10, 90), range(10, 90))
        assert bench.scheduler.stats().num_preemptions == 0


def test_every_kind_answers_right_with_and_without_hits() -> None:
    for groups in (
        (FULL, chunked(8)),
        (chunked(5),),
        (FULL, conv(3)),
        (conv(4), sliding(4)),
        (FULL, CROSS, RECURRENT),
        (FULL, recurrent()),
    ):
        groups = tuple(sorted(groups, key=lambda spec: spec.num_states))
        for overlap in (False, True):
            bench = Bench(fake_config(overlap=overlap, max_num_batched_tokens=12), fake_info(*groups))
            for number in range(3):
                assert_right(bench, str(number), range(10, 40), range(number))
            assert bench.scheduler.stats().prefix_hits > 0, groups


def _found(made: Bench, request_id: str, *prompt: object) -> int:
    assert_right(made, request_id, *prompt)
    return made.events[request_id][0].num_cached


@pytest.mark.parametrize("overlap", [False, True])
def test_short_convolutions_keep_inputs_where_prompts_part(overlap: bool) -> None:
    """Blocks within other prompts go first, however many there are: with few blocks, an image was computed again.

    With steps in flight, blocks are given back before their keys are known.
    """
    image = fake_item("image", 22)
    made = Bench(fake_config(max_num_batched_tokens=16, overlap=overlap), fake_info(FULL, conv(3)), (512, 1 + 12))
    assert _found(made, "1", range(10, 19), image, SHORT) == 0
    for number in range(10):
        assert _found(made, f"long {number}", range(100 + number, 160 + number)) == 0
        assert _found(made, f"image {number}", range(10, 19), image, (200 + number, 50, 51)) == (9 + 22) // 4 * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_short_convolutions_keep_inputs_where_prompts_have_parted(overlap: bool) -> None:
    """No policy knows where these prompts part, but the second one's hit does."""
    made = Bench(fake_config(max_num_batched_tokens=16, overlap=overlap), fake_info(FULL, conv(3)), (512, 1 + 12))
    assert _found(made, "1", range(10, 31), range(200, 206)) == 0
    assert _found(made, "2", range(10, 31), range(210, 216)) == 20
    for number in range(5):
        assert _found(made, f"long {number}", range(100 + number, 160 + number)) == 0
        assert _found(made, f"again {number}", range(10, 31), range(220 + number, 230)) == 20
