"""Jobs are read and prepared in their order, a window ahead; failures come in turn, a slow source stops nobody."""

from __future__ import annotations

import dataclasses
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import pytest

from beheld.api import feed as feeding
from beheld.api.feed import _PATIENCE_S, Fed, Feed, Job, Jobs, Reading
from beheld.core.errors import PromptError
from beheld.core.media import MediaItem
from beheld.core.params import SamplingParams
from tests.fakes import fake_item, fake_request


def made(number: int) -> MediaItem:
    return dataclasses.replace(fake_item(str(number), 1), feature_bytes=100)


def number_of(fed: Fed) -> int:
    (request,) = fed.requests()
    return int(request.id)


def each(count: int, taken: list[int], act: Any = None) -> Generator[Job, None, None]:
    for number in range(count):
        taken.append(number)

        def requests(number: int = number) -> list[Any]:
            if act is not None:
                act(number)
            return [fake_request(str(number), 1, made(number))]

        yield Job(str(number), SamplingParams(), requests, None)


def jobs(count: int, taken: list[int], act: Any = None, reading: Reading = Reading.TAKER) -> Jobs:
    return Jobs(each(count, taken, act), reading)


def jobs_until(go: threading.Event, reading: Reading, begun: threading.Event, closed: threading.Event) -> Jobs:
    """Jobs whose preparation waits for `go`; their source tells when it is begun and closed."""

    def source() -> Generator[Job, None, None]:
        begun.set()
        try:
            yield from each(1000, [], lambda _: go.wait(60))
        finally:
            closed.set()

    return Jobs(source(), reading)


def until(reached: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 10
    while not reached() and time.monotonic() < end:
        time.sleep(0.001)
    assert reached()


def all_of(feed: Feed) -> list[Fed]:
    """What there is still to take."""
    got = []
    while feed.more:
        fed = feed.take(wait=True)
        if fed is not None:
            got.append(fed)
    return got


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "beheld-read"]


@pytest.mark.parametrize("reading", Reading)
@pytest.mark.parametrize("threads", [0, 3])
def test_order_is_kept(threads: int, reading: Reading) -> None:
    feed = Feed(jobs(20, [], reading=reading), threads, 6)
    got = all_of(feed)
    assert [(fed.index, number_of(fed)) for fed in got] == [(i, i) for i in range(20)]
    assert all(fed.prepared >= fed.started for fed in got)
    assert feed.take(wait=True) is None
    feed.finish()
    feed.close()
    assert not readers()


@pytest.mark.parametrize("reading", Reading)
def test_no_more_than_the_window_is_prepared_ahead(reading: Reading) -> None:
    taken: list[int] = []
    feed = Feed(jobs(100, taken, reading=reading), 2, 5)
    assert feed.more
    until(lambda: len(taken) >= 4)
    assert len(taken) in (4, 5), "two for each thread, until it is known what they weigh"
    feed.take(wait=True)
    assert feed.more
    until(lambda: len(taken) >= 6)
    assert len(taken) == 6
    feed.close()
    assert not feed.more
    assert len(taken) == 6


def test_where_nothing_is_prepared_ahead_a_thread_reads_a_few() -> None:
    taken: list[int] = []
    done: list[int] = []
    feed = Feed(jobs(100, taken, done.append, Reading.THREAD), 0, 50)
    assert feed.more
    until(lambda: len(taken) >= 4)
    assert feed.take(wait=False) is not None
    until(lambda: len(taken) >= 5)
    assert (len(taken), done) == (5, [0])
    feed.close()
    assert len(taken) == 5


def test_a_bound_on_bytes_never_stops_everything() -> None:
    feed = Feed(jobs(30, []), 1, 50, max_bytes=1)
    got = []
    while feed.more:
        fed = feed.take(wait=True)
        assert fed is not None
        got.append(number_of(fed))
    assert got == list(range(30))


@pytest.mark.parametrize("reading", Reading)
def test_features_beyond_the_bound_stop_the_looking_ahead(reading: Reading) -> None:
    taken: list[int] = []
    most = [0]
    feed = Feed(jobs(60, taken, reading=reading), 2, 50, max_bytes=700)
    for number in range(60):
        assert feed.more
        until(lambda number=number: len(taken) - number >= min(7, 60 - number) or reading is Reading.TAKER)
        until(lambda: all(ahead.done for ahead in list(feed._ahead)))
        assert feed.more
        most.append(len(taken) - number)
        fed = feed.take(wait=True)
        assert fed is not None
        assert number_of(fed) == number
    assert max(most) == 7, "of 100 bytes each, and not the 50 of the window"
    until(lambda: not feed.more)


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

    both = (dataclasses.replace(job, light=job.id == "0") for job in each(2, [], act))
    feed = Feed(Jobs(both, Reading.TAKER), 2, 4)
    assert feed.more
    assert ready.wait(5)
    assert 0 not in where
    first, second = feed.take(wait=False), feed.take(wait=True)
    assert first is not None
    assert second is not None
    assert (first.index, second.index) == (0, 1)
    assert where[0] == threading.get_ident() != where[1]
    feed.close()


# ---- the source ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
def test_nobody_waits_for_a_slow_source_unless_asked(threads: int) -> None:
    gate = threading.Event()
    last = threading.Event()

    def slow() -> Generator[Job, None, None]:
        assert gate.wait(10)
        yield from each(1, [])
        assert last.wait(10)

    feed = Feed(Jobs(slow(), Reading.THREAD), threads, 4)
    assert feed.more, "for all that is known"
    assert feed.take(wait=False) is None
    gate.set()
    fed = feed.take(wait=True)
    assert fed is not None
    assert feed.take(wait=False) is None
    assert feed.more
    last.set()
    assert feed.take(wait=True) is None
    assert not feed.more
    feed.close()


def test_what_a_slow_source_gave_is_prepared_while_it_is_at_work_and_nobody_asks() -> None:
    prepared, gate = threading.Event(), threading.Event()

    def slow() -> Generator[Job, None, None]:
        yield from each(1, [], lambda number: prepared.set())
        assert gate.wait(10)

    feed = Feed(Jobs(slow(), Reading.THREAD), 1, 4)
    assert feed.more
    assert prepared.wait(10)
    gate.set()
    feed.close()


class OwnError(Exception):
    """What a user's code raises."""


@pytest.mark.parametrize("reading", Reading)
@pytest.mark.parametrize("threads", [0, 2])
def test_what_the_source_raises_comes_after_all_before_it(threads: int, reading: Reading) -> None:
    def failing() -> Generator[Job, None, None]:
        yield from each(3, [])
        raise OwnError

    feed = Feed(Jobs(failing(), reading), threads, 8)
    assert [number_of(fed) for fed in all_of(feed)] == [0, 1, 2]
    with pytest.raises(OwnError):
        feed.finish()
    feed.close()
    assert not readers()


@pytest.mark.parametrize("reading", Reading)
def test_closing_closes_the_source_in_the_thread_that_read_it(reading: Reading) -> None:
    where: list[int] = []

    def source() -> Generator[Job, None, None]:
        where.append(threading.get_ident())
        try:
            yield from each(100, [])
        finally:
            where.append(threading.get_ident())

    feed = Feed(Jobs(source(), reading), 2, 4)
    assert feed.take(wait=True) is not None
    feed.close()
    assert len(where) == 2
    assert where[0] == where[1]
    assert (where[0] == threading.get_ident()) == (reading is Reading.TAKER)
    assert not readers()


def test_closing_does_not_wait_for_ever_for_a_source_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "_PATIENCE_S", 0.01)
    at_work, gate, closed = threading.Event(), threading.Event(), threading.Event()

    def source() -> Generator[Job, None, None]:
        try:
            yield from each(1, [])
            at_work.set()
            assert gate.wait(10)
            yield from each(1, [])
        finally:
            closed.set()

    feed = Feed(Jobs(source(), Reading.THREAD), 2, 4)
    assert feed.take(wait=True) is not None
    assert at_work.wait(10)
    feed.close()
    (reader,) = readers()
    assert not closed.is_set()
    assert feed.take(wait=True) is None
    gate.set()
    reader.join(10)
    assert closed.is_set()
    assert not reader.is_alive()
    assert not feed.more, "what came too late is dropped"


def test_a_source_that_fails_when_it_is_closed_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def source() -> Generator[Job, None, None]:
        try:
            yield from each(2, [])
        finally:
            raise OwnError("in its finally")

    feed = Feed(Jobs(source(), Reading.THREAD), 0, 1)
    until(lambda: feed.more and bool(feed._ahead))
    with caplog.at_level("WARNING"):
        feed.close()
    assert "in its finally" in caplog.text
    assert not readers()


def test_closing_at_any_moment_leaves_nothing_behind() -> None:
    chance = random.Random(0)
    for _ in range(100):
        count, stop = chance.randrange(12), chance.randrange(12)
        taken: list[int] = []
        source = each(count, taken, lambda number: time.sleep(chance.choice((0, 0.0001))))
        feed = Feed(Jobs(source, Reading.THREAD), chance.choice((0, 1, 3)), chance.choice((1, 2, 8)))
        got = []
        while feed.more and len(got) < stop:
            fed = feed.take(wait=chance.choice((True, False)))
            got += [] if fed is None else [fed.index]
        feed.close()
        assert got == list(range(min(count, stop)))
        assert not readers()
        assert next(source, None) is None
        assert len(taken) <= len(got) + 9


@pytest.mark.parametrize("reading", Reading)
def test_a_signal_wherever_a_lock_is_taken_leaves_no_thread_behind(reading: Reading) -> None:
    """Of the feed's own or another's, as of a future: the signal comes as the taking returns."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    enter = threading.Condition.__enter__.__code__
    try:
        for stop in range(100):
            count = [0]
            go, begun, closed = (threading.Event() for _ in range(3))
            feed = Feed(jobs_until(go, reading, begun, closed), 2, 4)

            def profile(frame: FrameType, event: str, _: Any, count: list[int] = count, stop: int = stop) -> None:
                if event == "c_return" and frame.f_code is enter:
                    count[0] += 1
                    if count[0] == stop + 1:
                        signal.raise_signal(signal.SIGINT)

            interrupted = False
            sys.setprofile(profile)
            try:
                assert feed.more
                feed.take(wait=False)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.setprofile(None)
            pool = feed._pool
            assert pool is not None
            feed.close()
            assert not readers()
            assert closed.is_set() == begun.is_set()
            go.set()
            for thread in pool._threads:
                thread.join(10)
                assert not thread.is_alive()
            if not interrupted:
                break
        assert stop > 2, "it was interrupted"
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_is_begun_before_a_feed_is_asked() -> None:
    """Whoever is interrupted while it is made has nothing to close."""
    taken: list[int] = []
    feed = Feed(jobs(4, taken, reading=Reading.THREAD), 2, 4)
    assert not readers()
    feed.close()
    assert not taken
    assert not feed.more


def test_closing_what_ctrl_c_left_taken_does_not_wait_for_the_reader() -> None:
    feed = Feed(jobs(100, [], reading=Reading.THREAD), 0, 4)
    assert feed.more
    until(lambda: len(feed._ahead) == 4)
    feed._lock.acquire()
    start = time.monotonic()
    feed.close()
    assert time.monotonic() - start < _PATIENCE_S / 2
    assert not readers()


def test_a_reader_that_collects_the_last_of_its_feed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the lock, which is its own to give back."""
    failures: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: failures.append(str(told.exc_value)))
    closed = threading.Event()
    feed = Feed(jobs_until(threading.Event(), Reading.THREAD, threading.Event(), closed), 0, 100)
    room = feed._has_room

    def collected() -> bool:
        if threading.current_thread() is feed._reader and len(feed._ahead) == 2:
            feed.close()
        return room()

    monkeypatch.setattr(feed, "_has_room", collected)
    feed._look_ahead()
    assert closed.wait(10)
    until(lambda: not readers())
    assert not failures


def test_ctrl_c_where_the_lock_is_taken_holds_up_nobody() -> None:
    """Between the taking and the block: the threads would wait for ever, and so would the interpreter's end."""
    go = threading.Event()

    def work() -> list[Any]:
        assert go.wait(60)
        return []

    jobs = (Job(str(n), SamplingParams(), work, None) for n in range(4))
    feed = Feed(Jobs(jobs, Reading.TAKER, 4), 2, 4)
    assert feed.more
    pool, lock = feed._pool, feed._lock
    assert pool is not None

    class Interrupted:
        """The lock, and a signal behind its taking."""

        def __enter__(self) -> None:
            lock.acquire()
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            raise AssertionError

    feed._changed._lock = Interrupted()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        feed.take(wait=True)
    feed._changed._lock = lock  # type: ignore[attr-defined]
    feed.close()
    go.set()
    for thread in pool._threads:
        thread.join(60)
        assert not thread.is_alive()
