"""Jobs are prepared in their order, a window ahead, and a failure waits for its turn."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.api.feed import Fed, Feed, Job
from beheld.core.errors import PromptError
from beheld.core.media import MediaItem
from beheld.core.params import SamplingParams
from tests.fakes import fake_item, fake_request


def made(number: int) -> MediaItem:
    return dataclasses.replace(fake_item(str(number), 1), feature_bytes=100)


def number_of(fed: Fed) -> int:
    (request,) = fed.requests()
    return int(request.id)


def jobs(count: int, taken: list[int], act: Any = None) -> Iterator[Job]:
    for number in range(count):
        taken.append(number)

        def requests(number: int = number) -> list[Any]:
            if act is not None:
                act(number)
            return [fake_request(str(number), 1, made(number))]

        yield Job(str(number), SamplingParams(), requests, None)


@pytest.mark.parametrize("threads", [0, 3])
def test_order_is_kept(threads: int) -> None:
    feed = Feed(jobs(20, []), threads, 6)
    got = []
    while feed.more:
        fed = feed.take(wait=True)
        assert fed is not None
        assert fed.prepared >= fed.started
        got.append((fed.index, number_of(fed)))
    assert got == [(i, i) for i in range(20)]
    assert feed.take(wait=True) is None


def test_no_more_than_the_window_is_prepared_ahead() -> None:
    taken: list[int] = []
    feed = Feed(jobs(100, taken), 2, 5)
    assert feed.more
    assert len(taken) in (4, 5), "two for each thread, until it is known what they weigh"
    feed.take(wait=True)
    assert feed.more
    assert len(taken) == 6
    feed.close()
    assert not feed.more


def test_a_bound_on_bytes_never_stops_everything() -> None:
    feed = Feed(jobs(30, []), 1, 50, max_bytes=1)
    got = []
    while feed.more:
        fed = feed.take(wait=True)
        assert fed is not None
        got.append(number_of(fed))
    assert got == list(range(30))


def test_features_beyond_the_bound_stop_the_looking_ahead() -> None:
    taken: list[int] = []
    most = [0]
    feed = Feed(jobs(60, taken), 2, 50, max_bytes=700)
    for number in range(60):
        assert feed.more
        end = time.monotonic() + 10
        while not all(entry[2].done() for entry in feed._ahead) and time.monotonic() < end:
            time.sleep(0.001)
        assert feed.more
        most.append(len(taken) - number)
        fed = feed.take(wait=True)
        assert fed is not None
        assert number_of(fed) == number
    assert max(most) == 7, "of 100 bytes each, and not the 50 of the window"
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
            results.append(number_of(fed))
        except PromptError:
            results.append("failed")
    assert results == [0, "failed", 2]


def test_a_light_job_is_prepared_when_it_is_taken() -> None:
    """And by whoever takes it, while the others are prepared ahead of their turn."""
    where: dict[int, int] = {}
    ready = threading.Event()

    def act(number: int) -> None:
        where[number] = threading.get_ident()
        if number == 1:
            ready.set()

    both = [dataclasses.replace(job, light=job.id == "0") for job in jobs(2, [], act)]
    feed = Feed(iter(both), 2, 4)
    assert feed.more
    assert ready.wait(5)
    assert 0 not in where
    first, second = feed.take(wait=False), feed.take(wait=True)
    assert first is not None
    assert second is not None
    assert (first.index, second.index) == (0, 1)
    assert where[0] == threading.get_ident() != where[1]
    feed.close()
