"""Jobs are prepared in their order, a window ahead, and a failure waits for its turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.api.feed import Feed, Job
from beheld.core.errors import PromptError
from beheld.core.params import SamplingParams


def jobs(count: int, taken: list[int], act: Any = None) -> Iterator[Job]:
    for number in range(count):
        taken.append(number)

        def requests(number: int = number) -> list[Any]:
            if act is not None:
                act(number)
            return [number]

        yield Job(str(number), SamplingParams(), requests, None)


@pytest.mark.parametrize("threads", [0, 3])
def test_order_is_kept(threads: int) -> None:
    feed = Feed(jobs(20, []), threads, 6)
    got = []
    while feed.more:
        fed = feed.take(wait=True)
        assert fed is not None
        assert fed.prepared >= fed.started
        got.append((fed.index, *fed.requests()))
    assert got == [(i, i) for i in range(20)]
    assert feed.take(wait=True) is None


def test_no_more_than_the_window_is_prepared_ahead() -> None:
    taken: list[int] = []
    feed = Feed(jobs(100, taken), 2, 5)
    assert feed.more
    assert len(taken) == 5
    feed.take(wait=True)
    assert feed.more
    assert len(taken) == 6
    feed.close()
    assert not feed.more


def test_what_is_not_ready_is_waited_for_only_if_asked() -> None:
    gate = threading.Event()
    feed = Feed(jobs(2, [], lambda number: gate.wait(10)), 1, 2)
    assert feed.take(wait=False) is None
    gate.set()
    fed = feed.take(wait=True)
    assert fed is not None
    assert fed.index == 0


@pytest.mark.parametrize("threads", [0, 2])
def test_a_failure_comes_in_its_turn(threads: int) -> None:
    def act(number: int) -> None:
        if number == 1:
            raise PromptError("no")

    feed = Feed(jobs(3, [], act), threads, 3)
    results = []
    while feed.more:
        fed = feed.take(wait=True)
        assert fed is not None
        try:
            results.append(fed.requests()[0])
        except PromptError:
            results.append("failed")
    assert results == [0, "failed", 2]
