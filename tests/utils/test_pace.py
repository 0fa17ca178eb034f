"""A time limit that grows with what comes, to an end that it never passes."""

from __future__ import annotations

import asyncio
import time

import pytest

from beheld.inputs.fetch.fetch import times_s
from beheld.server.options import ServerOptions
from beheld.utils.pace import MIN_RATE, paced
from tests.server.slowness import slowness


@pytest.mark.parametrize(
    ("piece", "low", "high"),
    [(0, 0.2, 0.5), (1, 0.2, 0.5), (MIN_RATE // 50, 0.25, 0.6), (MIN_RATE // 5, 0.8, 1.2)],
    ids=["nothing", "a drip", "too slow", "fast enough"],
)
def test_time_grows_with_what_comes(piece: int, low: float, high: float) -> None:
    async def receive() -> None:
        async with paced(0.2, 0.8) as pace:
            while True:
                await asyncio.sleep(0.05)
                pace.received(piece)

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(receive())
    assert low * 0.9 <= time.monotonic() - begin < high * slowness()


def test_nobody_earns_a_long_silence() -> None:
    async def receive() -> None:
        async with paced(0.2, 5.0) as pace:
            pace.received(100 * MIN_RATE)
            await asyncio.sleep(10)

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(receive())
    assert time.monotonic() - begin < 3.0


def test_waiting_for_others_is_not_the_senders_doing() -> None:
    async def receive() -> None:
        async with paced(0.2, 5.0) as pace:
            await asyncio.sleep(0.1)
            with pace.waiting():
                await asyncio.sleep(0.4)
            await asyncio.sleep(0.05)

    asyncio.run(receive())

    async def wait() -> None:
        async with paced(0.1, 0.3) as pace:
            with pace.waiting():
                await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


@pytest.mark.case(7)
@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_who_sends_nothing_has_ten_seconds_unless_told(modality: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{modality.upper()}_FETCH_TIMEOUT"
    for prefix in ("BEHELD", "VLLM"):
        monkeypatch.delenv(f"{prefix}_{name}", raising=False)
    first_s, most_s = times_s(modality)
    assert first_s <= 10.0
    assert most_s == {"image": 5.0, "video": 30.0, "audio": 10.0}[modality]
    monkeypatch.setenv(f"VLLM_{name}", "70")
    assert times_s(modality) == (70.0, 70.0)


def test_63_the_servers_own_limits_are_those_of_the_case() -> None:
    options = ServerOptions()
    assert max(options.header_s, options.body_s) <= 10.0
