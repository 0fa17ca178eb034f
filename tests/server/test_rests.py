"""Turns and rests of long work in threads (cases 129 and 130), which leave others the interpreter."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from beheld.api.pools import Pools
from beheld.core.params import SamplingParams
from beheld.core.request import ForeignTemplate
from beheld.core.structured_outputs import StructuredOutputs
from beheld.inputs.pipeline import Chat
from beheld.server import limits
from beheld.server.admission import AdmissionControl
from beheld.server.options import ServerOptions
from beheld.server.read import Reader
from beheld.server.request_turns import RequestTurns
from beheld.utils import host_turns
from beheld.utils.host_turns import HostTurns
from tests.server.running import Running
from tests.server.slowness import best

pytestmark = pytest.mark.case(129)

LONG = [{"role": "user", "content": "a"}] * 900
SEEN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a.test/"}}]}]


def compute(seconds: float) -> tuple[float, float]:
    begin = time.monotonic()
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return begin, time.monotonic()


def spans(host: HostTurns, clients: str, work: Callable[[], Any]) -> list[Any]:
    """What pieces of work of these clients return, two threads for all."""

    async def story() -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return await asyncio.gather(*(host.run(pool, client, work) for client in clients))

    return asyncio.run(story())


def test_while_others_ask_long_work_runs_one_at_a_time_and_rests_as_long() -> None:
    host = HostTurns()
    with host.asking("b"):
        found = sorted(spans(host, "aaa", lambda: compute(0.02)))
    for (_, ended), (begun, _) in pairwise(found):
        assert begun - ended >= 0.019


def test_the_work_of_a_client_alone_waits_for_nothing() -> None:
    """Bodies of 4 MiB of one client were read at half their speed and less."""
    host, both = HostTurns(), threading.Barrier(2, timeout=5)
    host.seen("a")
    with host.asking("a"):
        # Each waits until the other runs, too.
        spans(host, "aa", both.wait)

        def between_s() -> float:
            found = sorted(spans(host, "a", lambda: compute(0.04)) + spans(host, "a", lambda: compute(0.0)))
            return found[1][0] - found[0][1]

        assert best(between_s, 0.03) < 0.03


def test_short_work_needs_no_rest_and_a_rest_is_bounded_and_follows_failing_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    host = HostTurns()
    own = SimpleNamespace(sleep=sleep, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr(host_turns, "asyncio", own)
    with host.asking("b"):
        spans(host, "aaa", lambda: compute(0.0001))
        assert not slept

        def failing() -> None:
            compute(0.1)
            raise ValueError("own")

        with pytest.raises(ValueError, match="own"):
            spans(host, "a", failing)
        spans(host, "a", lambda: compute(0.0))
    assert len(slept) == 1
    assert 0.03 < slept[0] <= host_turns._LONGEST_REST_S


def test_another_client_asks_while_its_request_is_in_work_and_a_moment_longer() -> None:
    now = 100.0
    host = HostTurns(lambda: now)
    assert not host.others_ask("a")
    with host.asking("b"):
        now += 60
        assert host.others_ask("a")
        assert not host.others_ask("b")
    assert not host.others_ask("a")
    host.seen("b")
    for _ in range(3):
        host.seen("a")
    assert host.others_ask("a")
    assert host.others_ask("b")
    now += host_turns._RECENT_S / 2
    host.seen("a")
    now += 0.6 * host_turns._RECENT_S
    assert not host.others_ask("a")
    assert host.others_ask("b")


def test_large_bodies_of_clients_are_parsed_in_turn_and_with_rests() -> None:
    """64 bodies of 2 MB with 40,000 keys held /health for 179 ms and a chat for 1.7 s."""
    order: list[str] = []
    found: list[tuple[float, float]] = []

    def parse(client: str) -> None:
        order.append(client)
        found.append(compute(0.01))

    async def story() -> None:
        options, host = ServerOptions(), HostTurns()
        admission = AdmissionControl(options)
        reader = Reader(admission, options, limits.JSON, RequestTurns(), host)
        body = bytearray(limits.INLINE_BYTES + 1)
        with host.asking("a"), host.asking("b"):
            held = [(client, admission.hold(client)) for client in "aaaaaab"]
            await asyncio.gather(*(reader._in_turn(body, one, parse, client) for client, one in held))

    asyncio.run(story())
    # Two that have begun and the first that waits are before it.
    assert order.index("b") <= 3
    assert all(begun - ended >= 0.009 for (_, ended), (begun, _) in pairwise(found))


@pytest.mark.parametrize(("objects", "loops"), [(limits.INLINE_OBJECTS, True), (limits.INLINE_OBJECTS + 1, False)])
def test_small_bodies_of_many_objects_are_parsed_in_a_thread(objects: int, *, loops: bool) -> None:
    """64 chats of 900 messages in 30 KB held /health for 116 to 171 ms: the loop checked each for 10 ms and more."""

    async def story() -> threading.Thread:
        options = ServerOptions()
        admission = AdmissionControl(options)
        reader = Reader(admission, options, limits.JSON, RequestTurns(), HostTurns())
        body, held = bytearray(b"{" * objects + b" " * (limits.QUICK_BYTES + 1)), admission.hold("a")
        found = await reader._in_turn(body, held, threading.current_thread)
        # What else is made of it runs in the same place.
        assert (await reader.work(held, threading.current_thread) is threading.current_thread()) == loops
        return found

    assert (asyncio.run(story()) is threading.current_thread()) == loops


@pytest.mark.parametrize("size", [limits.INLINE_BYTES + 1, limits.LARGE_BYTES + 1])
def test_large_bodies_start_no_collection_while_they_are_parsed(size: int) -> None:
    """Every other body of 40,000 keys started one of all objects, which kept the interpreter for 60 to 90 ms."""

    async def story() -> bool:
        options = ServerOptions()
        admission = AdmissionControl(options)
        reader = Reader(admission, options, limits.JSON, RequestTurns(), HostTurns())
        held = admission.hold("a")
        held.grow(size)
        return await reader._in_turn(bytearray(size), held, gc.isenabled)

    assert gc.isenabled()
    assert not asyncio.run(story())
    assert gc.isenabled()


@pytest.mark.case(130)
def test_conversations_of_hundreds_of_messages_take_no_thread_of_short_ones() -> None:
    """64 of them, in two threads of texts and two of bodies, let a short chat wait for 2.6 to 3 s: steps of 20 ms of
    the engine's thread, which takes the interpreter hundreds of times, took 140 and more."""
    pools, params = Pools(HostTurns()), SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    try:
        assert pools.of(Chat(LONG), None) is pools.of_reading(Chat(LONG), None) is pools.slow
        # Those with a grammar or media are read there, too, before they wait for compilers and decoders.
        assert pools.of(Chat(LONG), params) is pools.grammar
        assert pools.of(Chat([*LONG, *SEEN]), None) is pools.media
        assert pools.of_reading(Chat(LONG), params) is pools.of_reading(Chat([*LONG, *SEEN]), None) is pools.slow
        foreign = ForeignTemplate("{{ messages }}")
        assert pools.of_reading(Chat(LONG, chat_template=foreign), None) is pools.template
        assert pools.of_reading(Chat(SEEN), None) is pools.media
        assert pools.of_reading(Chat(LONG[:200]), params) is pools.grammar
        assert pools.of(Chat(LONG[:200]), None) is pools.text
    finally:
        pools.close()


@pytest.mark.case(130)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "others ask"])
def test_such_conversations_are_read_one_at_a_time_while_others_ask(*, others: bool) -> None:
    host = HostTurns()
    pools, running, most = Pools(host), 0, 0
    both = threading.Barrier(2, timeout=5)

    def read() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if others:
            time.sleep(0.01)
        else:
            both.wait()
        running -= 1

    async def story() -> None:
        with host.asking("b" if others else "a"):
            await asyncio.gather(*(pools.run(pools.slow, "a", read) for _ in range(4)))

    try:
        asyncio.run(story())
    finally:
        pools.close()
    assert most == (1 if others else 2)


@pytest.mark.case(130)
def test_a_request_counts_as_asking_until_its_answer_ends(running: Running) -> None:
    host = running.llm.host

    async def story() -> tuple[bool, bool]:
        answer: AsyncGenerator[Any, None] = running.llm.generate({"prompt_token_ids": [5]}, client="c")
        await anext(answer)
        within = "c" in host._asking
        await answer.aclose()
        return within, "c" in host._asking

    loop = running.server._loop
    assert loop is not None
    assert asyncio.run_coroutine_threadsafe(story(), loop).result(30) == (True, False)


@pytest.mark.case(130)
@pytest.mark.parametrize("path", ["/health", "/version"])
def test_every_request_is_seen(running: Running, path: str) -> None:
    host = running.llm.host
    host.seen("someone else")
    assert httpx.get(running.url + path).status_code == 200
    assert host.others_ask("someone else")
    assert host._last[0] != "someone else"
