"""BlockPool: states of a block, the order of eviction, and that check() sees what is wrong."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from beheld.scheduler.cache.blocks import BlockPool


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


def test_every_block_but_the_null_block_is_given_once() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check(Counter(blocks))
    with pytest.raises(AssertionError, match="beyond"):
        pool.allocate(1)
    pool.free(blocks)
    assert pool.num_free == 4
    pool.check({})


def test_a_block_without_a_key_goes_before_a_cached_one_and_the_oldest_cached_first() -> None:
    pool = BlockPool(6)
    first, second, third, plain = pool.allocate(4)
    for number, block in enumerate((first, second, third)):
        pool.set_key(block, key(number))
    pool.free([third, second, plain, first])
    pool.check({})
    assert set(pool.allocate(2)) == {plain, 5}
    assert pool.allocate(1) == [third]
    assert [pool.find(key(n)) for n in range(3)] == [first, second, None]
    pool.check(Counter([plain, 5, third]))


def test_sharing_takes_a_cached_block_out_of_the_free_list() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.set_key(block, key(1))
    pool.share(block)
    pool.free([block])
    assert not pool.is_free(block)
    pool.free([block])
    assert pool.is_free(block)
    assert pool.num_free == 2
    pool.share(block)
    assert pool.num_free == 1
    pool.check({block: 1})
    with pytest.raises(AssertionError, match="with a key"):
        pool.share(pool.allocate(1)[0])


def test_the_second_block_of_equal_content_stays_without_a_key() -> None:
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    pool.set_key(one, key(7))
    pool.set_key(two, key(7))
    assert pool.find(key(7)) == one
    pool.drop_key(key(7))
    assert not pool.holds(key(7))
    pool.drop_key(key(7))
    pool.free([one, two])
    assert pool.num_cached == 0
    pool.check({})


def test_clearing_keeps_references() -> None:
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    pool.set_key(one, key(1))
    pool.set_key(two, key(2))
    pool.free([two])
    pool.clear_keys()
    assert pool.num_cached == 0
    assert pool.num_free == 2
    pool.check({one: 1})


def test_null_blocks_are_not_freed_and_a_double_free_is_caught() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.free([0, block, 0])
    with pytest.raises(AssertionError, match="twice"):
        pool.free([block])


def test_check_sees_a_lost_block_and_a_wrong_count() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="reference count"):
        pool.check({blocks[0]: 2, blocks[1]: 1})
    pool._plain.clear()
    with pytest.raises(AssertionError, match="lost"):
        pool.check(Counter(blocks))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_order_of_operations_keeps_every_invariant(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(2, 9)))
    held: list[int] = []
    for _ in range(30):
        act = data.draw(st.sampled_from(["take", "free", "name", "share", "drop", "clear"]))
        number = key(data.draw(st.integers(0, 5)))
        if act == "take" and pool.num_free:
            held += pool.allocate(data.draw(st.integers(1, pool.num_free)))
        elif act == "free" and held:
            block = data.draw(st.sampled_from(held))
            held.remove(block)
            pool.free([block])
        elif act == "name" and held:
            block = data.draw(st.sampled_from(held))
            if block not in pool._key_by_block:
                pool.set_key(block, number)
        elif act == "share" and (found := pool.find(number)) is not None:
            pool.share(found)
            held.append(found)
        elif act == "drop":
            pool.drop_key(number)
        elif act == "clear":
            pool.clear_keys()
        pool.check(Counter(held))


def test_a_renamed_block_is_found_by_its_new_key_alone() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    for block, key in ((first, b"early"), (second, b"other"), (third, b"known")):
        pool.set_key(block, key)
        pool.free((block,))
    pool.rename_key(b"early", b"new")
    assert (pool.find(b"early"), pool.find(b"new")) == (None, first)
    pool.rename_key(b"other", b"known")
    assert (pool.find(b"other"), pool.find(b"known")) == (None, third)
    pool.rename_key(b"gone", b"newer")
    assert pool.find(b"newer") is None
    pool.check({})
    assert pool.allocate(3) == [second, first, third]
