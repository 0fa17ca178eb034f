"""Block keys tell apart whatever changes keys and values, and lookups find the longest usable prefix."""

from __future__ import annotations

from dataclasses import replace

from beheld.core.request import LoRARequest, Request
from beheld.scheduler.cache.full import FullGroup
from beheld.scheduler.cache.paged import PagedGroup
from beheld.scheduler.cache.prefix import PrefixKeys, extend_keys, root_key
from beheld.scheduler.cache.sliding import SlidingGroup
from beheld.scheduler.sequence import Sequence
from tests.fakes import FULL, PLACEHOLDER, fake_item, fake_request, sliding

CAT, DOG = fake_item("cat", 6), fake_item("dog", 6)


def keys(request: Request, count: int, block_size: int = 4) -> list[bytes]:
    return list(extend_keys(Sequence.born(request, (0, 0.0, 0), 1, 999, 999), count, block_size))


def test_equal_prefixes_have_equal_keys_and_later_blocks_depend_on_earlier_ones() -> None:
    one = keys(fake_request("1", range(12)), 3)
    assert one == keys(fake_request("2", range(13), max_tokens=3), 3)
    assert len(set(one)) == 3
    assert all(len(k) == 32 for k in one)
    other = keys(fake_request("3", 50, range(1, 12)), 3)
    assert not set(one) & set(other)


def test_a_block_does_not_depend_on_what_follows_it() -> None:
    one = keys(fake_request("1", range(8), CAT, 1), 3)
    two = keys(fake_request("2", range(8), DOG, 1), 3)
    assert one[:2] == two[:2]
    assert one[2] != two[2]


def test_where_all_media_see_each_other_a_block_depends_on_those_behind_it() -> None:
    def joint(request: Request, low: int, high: int) -> list[bytes]:
        sequence = Sequence.born(request, (0, 0.0, 0), 1, 999, 999)
        sequence.joint = (low, high)
        # In two goes, as a sequence that grows asks for them.
        extend_keys(sequence, 2, 4)
        return list(extend_keys(sequence, 6, 4))

    one = joint(fake_request("1", range(5), CAT, 7, CAT, range(9)), 5, 18)
    two = joint(fake_request("2", range(5), CAT, 7, DOG, range(9)), 5, 18)
    same = joint(fake_request("3", range(5), CAT, 7, CAT, range(9)), 5, 18)
    fewer = joint(fake_request("4", range(5), CAT, 7, CAT, range(9)), 5, 11)
    assert one == same
    assert one[0] == two[0] == fewer[0]
    assert not set(one[1:]) & set(two[1:])
    assert not set(one[1:]) & set(fewer[1:])


def test_the_picture_and_where_it_starts_are_part_of_the_key() -> None:
    text = [PLACEHOLDER] * 8
    made = [
        keys(fake_request("1", text, 1), 2),
        keys(fake_request("2", CAT, PLACEHOLDER, PLACEHOLDER, 1), 2),
        keys(fake_request("3", PLACEHOLDER, CAT, PLACEHOLDER, 1), 2),
        keys(fake_request("4", PLACEHOLDER, DOG, PLACEHOLDER, 1), 2),
    ]
    assert len({pair[0] for pair in made}) == 4
    assert len({pair[1] for pair in made}) == 4


def test_positions_before_the_first_item_with_states_depend_on_all_of_them() -> None:
    east, west, north = (fake_item(name, 1, num_states=6) for name in ("east", "west", "north"))
    text = range(3, 10)
    alone = keys(fake_request("1", text, east, 1), 2)
    assert keys(fake_request("2", text, west, 1), 1)[0] != alone[0]
    assert keys(fake_request("3", text, east, 1, west), 1)[0] != alone[0]
    assert keys(fake_request("4", text, east, 5, 5), 1)[0] == alone[0]
    first = keys(fake_request("5", east, text, west, 1), 2)
    assert first == keys(fake_request("6", east, text, north, 1), 2)
    assert first[0] != keys(fake_request("7", west, text, west, 1), 1)[0]


def test_many_spans_each_enter_the_blocks_that_they_overlap_only() -> None:
    tiny = [fake_item(str(i), 1) for i in range(8)]
    one = keys(fake_request("1", *tiny), 2)
    changed = [*tiny[:4], fake_item("x", 1), *tiny[5:]]
    two = keys(fake_request("2", *changed), 2)
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_adapter_and_salt_separate_everything() -> None:
    lora = LoRARequest("a", 1)
    roots = {
        root_key(fake_request("1", 5)),
        root_key(fake_request("2", 5, salt=b"me")),
        root_key(fake_request("3", 5, salt=b"you")),
        root_key(fake_request("4", 5, lora=lora)),
        root_key(fake_request("5", 5, lora=lora, salt=b"me")),
        # A number may be given to another adapter; and no salt spells a digest.
        root_key(fake_request("6", 5, lora=replace(lora, digest=b"one"))),
        root_key(fake_request("7", 5, lora=replace(lora, digest=b"two"))),
        root_key(fake_request("8", 5, lora=lora, salt=b"one")),
    }
    assert len(roots) == 8


def test_keys_grow_with_the_output() -> None:
    sequence = Sequence.born(fake_request("1", range(6)), (0, 0.0, 0), 1, 999, 999)
    first = list(extend_keys(sequence, 1, 4))
    sequence.token_ids += [6, 7]
    assert extend_keys(sequence, 2, 4) == keys(fake_request("2", range(8)), 2)
    assert sequence.block_keys[:1] == first


def longest(group: PagedGroup, cached: str) -> int:
    """The hit of a sequence of which the group has a cached block for each "x" of the pattern."""
    sequence = Sequence.born(fake_request("1", (5,) * 99), (0, 0.0, 0), 1, 999, 999)
    sequence.block_keys = [index.to_bytes(32, "big") for index in range(len(cached))]
    for name, mark in zip(sequence.block_keys, cached, strict=True):
        if mark == "x":
            group.pool.set_key(group.pool.allocate(1)[0], name)
    return group.longest_hit(PrefixKeys(sequence, 4), len(cached))


def test_a_full_group_needs_a_run_without_gaps() -> None:
    for pattern, expected in [("xxx", 3), ("xx.x", 2), (".xx", 0), ("", 0)]:
        assert longest(FullGroup(FULL, 0, 9, 4), pattern) == expected, pattern


def test_a_sliding_group_needs_only_what_its_window_sees() -> None:
    # pattern, window, expected length; blocks of 4: a window of 6 sees 5 positions back, hence 2 blocks.
    cases = [
        ("..xx", 6, 4),
        ("..xx", 9, 4),
        (".x.x", 6, 0),
        ("xx.x", 6, 2),
        ("xxx..", 6, 3),
        ("...x", 5, 4),
        ("...x", 1, 4),
        ("....", 1, 4),
        ("....", 2, 0),
        (".xx..", 10, 0),
        ("xxx..", 10, 3),
        ("x....", 10, 1),
    ]
    for pattern, window, expected in cases:
        assert longest(SlidingGroup(sliding(window), 0, 9, 4), pattern) == expected, (pattern, window)
