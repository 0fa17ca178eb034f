"""/health tells of the engine without waiting for a step of it, and takes a short way through the server (case 125)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock, patch

import pytest

from beheld.server import health
from beheld.server.health import EngineHealth
from tests.server.running import ENGINE, Running

pytestmark = pytest.mark.case(125)

# A ping may begin a second after the step, and is late after 1.5 s.
STEP_S = 4.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def asked() -> Iterator[Running]:
    running = Running("qwen2_vl", ENGINE, health_s=1.5)
    yield running
    running.close()


def slow_step(running: Running, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """An answer whose first step takes STEP_S; returns when the step has begun."""
    executor = running.llm._engine._core.executor  # type: ignore[attr-defined]
    begun, launch = threading.Event(), executor.launch

    def slow(plan: Any) -> Any:
        if not begun.is_set():
            begun.set()
            time.sleep(STEP_S)
        return launch(plan)

    monkeypatch.setattr(executor, "launch", slow)
    thread = threading.Thread(target=running.post, args=("/v1/completions", {"prompt": [7], "max_tokens": 2}))
    thread.start()
    assert begun.wait(10)
    return thread


def test_a_step_keeps_nobody_waiting_but_a_long_silence_is_told(
    asked: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = slow_step(asked, monkeypatch)
    begin = time.monotonic()
    assert asked.get("/health").json() == {"status": "ok"}
    assert time.monotonic() - begin < STEP_S / 2
    while (answer := asked.get("/health")).status_code == 200:
        assert time.monotonic() - begin < STEP_S
        time.sleep(0.05)
    assert answer.json()["error"]["code"] == "engine_hangs"
    thread.join(10)
    while asked.get("/health").status_code != 200:
        assert time.monotonic() - begin < STEP_S + 5
        time.sleep(0.05)


def test_an_engine_that_wakes_up_does_not_hang(asked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe would otherwise end a server that reads its weights again."""
    llm, executor = asked.llm, asked.llm._engine._core.executor  # type: ignore[attr-defined]
    begun, wake_up = threading.Event(), executor.wake_up

    def slow(parts: Any) -> None:
        begun.set()
        time.sleep(STEP_S)
        wake_up(parts)

    def order(coroutine: Any) -> Future[Any]:
        assert llm._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, llm._loop)

    monkeypatch.setattr(executor, "wake_up", slow)
    order(llm.sleep(2)).result(10)
    assert asked.get("/health").status_code == 200
    woken = order(llm.wake_up())
    assert begun.wait(10)
    while not woken.done():
        assert asked.get("/health").status_code == 200
        time.sleep(0.05)
    woken.result()
    assert time.monotonic() - 1 < llm.waking_until < time.monotonic()


def test_a_ping_that_fails_is_not_the_last() -> None:
    """A ping that raised ended the watch, and /health said for ever that the engine hangs."""
    count = 0

    async def ping() -> None:
        nonlocal count
        count += 1
        if count < 3:
            raise RuntimeError("lost")

    async def watched() -> None:
        watch = EngineHealth(Mock(ping=ping, is_alive=True), Mock(draining=False), 1.5)
        watch.watch()
        while count < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert watch._pinged is None

    with patch.object(health, "_PING_EVERY_S", 0.01):
        asyncio.run(asyncio.wait_for(watched(), 5))


def test_both_ways_give_the_same_answer(asked: Running) -> None:
    """Any query takes the usual way."""

    def answer(raw: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
        head, _, body = asked.raw(raw).partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        return status, dict(line.lower().split(b": ", 1) for line in lines), body

    early, usual = answer(HEALTH), answer(HEALTH.replace(b"/health", b"/health?"))
    longer = answer(HEALTH.replace(b"/health", b"/health?a=1"))
    for found in (usual, longer):
        assert found[0] == early[0]
        assert found[2] == early[2]
        assert found[1].keys() == early[1].keys()
        for name in found[1].keys() - {b"x-request-id", b"date"}:
            assert found[1][name] == early[1][name]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (HEALTH.replace(b"GET", b"DELETE"), b"405"),
        (HEALTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"), b"400"),
        (HEALTH.replace(b"\r\n\r\n", b"\r\na: b" * 200 + b"\r\n\r\n"), b"431"),
    ],
)
def test_what_a_guard_refuses_is_refused(asked: Running, raw: bytes, status: bytes) -> None:
    assert asked.raw(raw).split(b" ", 2)[1] == status


def test_it_is_counted_once(asked: Running) -> None:
    def count() -> float:
        lines = asked.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "requests_total" in line and '"health"' in line)

    before = count()
    asked.raw(HEALTH)
    assert count() == before + 1
