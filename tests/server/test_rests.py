"""Rests after long work in threads (case 129): bodies of many keys leave the event loop the interpreter."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest

from beheld.server import limits, request_turns
from beheld.server.admission import AdmissionControl
from beheld.server.options import ServerOptions
from beheld.server.read import Reader
from beheld.server.request_turns import RequestTurns, Rests

pytestmark = pytest.mark.case(129)


def compute(seconds: float) -> tuple[float, float]:
    begin = time.monotonic()
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return begin, time.monotonic()


def spans(rests: Rests, seconds: float) -> list[tuple[float, float]]:
    """When three threads' pieces of work ran, in order."""
    found: list[tuple[float, float]] = []
    threads = [threading.Thread(target=lambda: found.append(rests.run(compute, seconds))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found)


def test_long_work_runs_one_at_a_time_and_rests_as_long() -> None:
    found = spans(Rests(), 0.02)
    for (_, ended), (begun, _) in pairwise(found):
        assert begun - ended >= 0.019


def test_short_work_and_the_first_of_all_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    rests = Rests()
    for _ in range(3):
        rests.run(compute, 0.0001)
    assert slept == [0.0] * 3


def test_a_rest_is_bounded_and_follows_failing_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    rests = Rests()

    def failing() -> None:
        compute(0.1)
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        rests.run(failing)
    rests.run(compute, 0.0)
    assert 0.03 < slept[-1] <= request_turns._LONGEST_REST_S


def test_large_bodies_of_clients_are_parsed_in_turn_and_with_rests() -> None:
    """64 bodies of 2 MB with 40,000 keys held /health for 179 ms and a chat for 1.7 s."""
    order: list[str] = []
    found: list[tuple[float, float]] = []

    def parse(client: str) -> None:
        order.append(client)
        found.append(compute(0.01))

    async def story() -> None:
        options = ServerOptions()
        reader = Reader(AdmissionControl(options), options, limits.JSON, RequestTurns())
        body = bytearray(limits.INLINE_BYTES + 1)
        await asyncio.gather(*(reader._in_turn(body, client, parse, client) for client in "aaaaaab"))

    asyncio.run(story())
    # Two that have begun and the first that waits are before it.
    assert order.index("b") <= 3
    assert all(begun - ended >= 0.009 for (_, ended), (begun, _) in pairwise(found))


@pytest.mark.parametrize(("objects", "loops"), [(limits.INLINE_OBJECTS, True), (limits.INLINE_OBJECTS + 1, False)])
def test_small_bodies_of_many_objects_are_parsed_in_a_thread(objects: int, *, loops: bool) -> None:
    """64 chats of 900 messages in 30 KB held /health for 116 to 171 ms: the loop checked each for 10 ms and more."""

    async def story() -> threading.Thread:
        options = ServerOptions()
        reader = Reader(AdmissionControl(options), options, limits.JSON, RequestTurns())
        body = bytearray(b"{" * objects + b" " * (limits.QUICK_BYTES + 1))
        return await reader._in_turn(body, "a", threading.current_thread)

    assert (asyncio.run(story()) is threading.current_thread()) == loops
