"""The leaves: the bounded map, environment variables, the paused collector, messages said once."""

from __future__ import annotations

import gc
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beheld.utils import env
from beheld.utils.allocator import held_bytes, keep_freed_memory
from beheld.utils.gc_tuning import paused_collector
from beheld.utils.log import once
from beheld.utils.lru import LRU


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12))))
def test_lru_holds_the_newest_that_fit(bound: int, puts: list[tuple[int, int]]) -> None:
    cache: LRU[int, int] = LRU(bound)
    model: list[tuple[int, int]] = []
    for key, size in puts:
        cache.put(key, size, size)
        model = [entry for entry in model if entry[0] != key]
        if size <= bound:
            model.append((key, size))
        while sum(entry[1] for entry in model) > bound:
            model.pop(0)
        assert cache.num_bytes == sum(entry[1] for entry in model)
        assert len(cache) == len(model)
    for key, size in model:
        assert cache.get(key) == size


def test_lru_use_makes_new() -> None:
    cache: LRU[str, int] = LRU(2)
    cache.put("a", 1, 1)
    cache.put("b", 2, 1)
    assert cache.get("a") == 1
    cache.put("c", 3, 1)
    assert "b" not in cache
    assert cache.get("a") == 1
    assert cache.stats.evictions == 1


def test_collector_is_paused_and_comes_back() -> None:
    assert gc.isenabled()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            pass
        assert not gc.isenabled(), "the inner one must not switch it on"
    assert gc.isenabled()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEHELD_IMAGE_FETCH_TIMEOUT", raising=False)
    monkeypatch.delenv("VLLM_IMAGE_FETCH_TIMEOUT", raising=False)
    assert env.IMAGE_FETCH_TIMEOUT() == 5.0
    monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", "7")
    assert env.IMAGE_FETCH_TIMEOUT() == 7.0
    monkeypatch.setenv("BEHELD_IMAGE_FETCH_TIMEOUT", "2.5")
    assert env.IMAGE_FETCH_TIMEOUT() == 2.5
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "maybe")
    with pytest.raises(ValueError, match="BEHELD_ALLOW_PRIVATE_FETCH"):
        env.ALLOW_PRIVATE_FETCH()


def test_the_allocator_takes_the_settings() -> None:
    assert keep_freed_memory()


def test_held_memory_is_what_was_taken_and_not_given_back() -> None:
    assert held_bytes() is not None
    for size, count in ((5_000, 1000), (1_000_000, 10), (50, 100_000)):
        # What earlier tests left goes first.
        gc.collect()
        before = held_bytes() or 0
        taken = [bytes(bytearray(size)) for _ in range(count)]
        more = (held_bytes() or 0) - before
        assert 0.7 * size * count < more < 1.5 * size * count + count * 100, (size, more)
        del taken
        gc.collect()
        assert (held_bytes() or 0) - before < 500_000


def test_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test.once")
    for _ in range(3):
        once(logger, logging.WARNING, "said in test_once")
    assert caplog.text.count("said in test_once") == 1
