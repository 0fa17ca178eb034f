"""What is written in one turn of the event loop goes out in one piece, in order, and before the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from beheld.server.write_coalescing import CoalescingTransport
from tests.server.running import Running, request_bytes, talk


class Recorder(asyncio.Transport):
    """Keeps what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.told.append(bytes(data))

    def close(self) -> None:
        self.told.append("close")

    def abort(self) -> None:
        self.told.append("abort")

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")


@pytest.mark.parametrize(
    ("end", "last"), [("close", [b"late", "close"]), ("abort", ["abort"]), (None, [b"late"])], ids=str
)
def test_turns_are_pieces(end: str | None, last: list[Any]) -> None:
    async def turns() -> list[Any]:
        inner = Recorder()
        transport = CoalescingTransport(inner, asyncio.get_running_loop())
        transport.write(b"head ")
        transport.write(bytearray(b"and "))
        transport.write(memoryview(b"body"))
        assert inner.told == []
        await asyncio.sleep(0)
        transport.write(b"next")
        await asyncio.sleep(0)
        # More than is held back goes out at once, and what comes later in the same turn behind it.
        transport.write(b"x")
        transport.write(b"y" * (64 << 10))
        assert inner.told[-1] == b"x" + b"y" * (64 << 10)
        transport.write(b"z")
        await asyncio.sleep(0)
        transport.write(b"late")
        if end is not None:
            getattr(transport, end)()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return inner.told

    told = asyncio.run(turns())
    assert told == [b"head and body", b"next", b"x" + b"y" * (64 << 10), b"z", *last]


def test_reading_that_is_held_is_resumed_when_both_let_it() -> None:
    async def turns() -> list[Any]:
        inner = Recorder()
        transport = CoalescingTransport(inner, asyncio.get_running_loop())
        transport.hold_reading()
        transport.pause_reading()
        transport.release_reading()
        assert "resume" not in inner.told
        transport.hold_reading()
        transport.resume_reading()
        assert "resume" not in inner.told
        transport.release_reading()
        return inner.told[-1:]

    assert asyncio.run(turns()) == ["resume"]


def test_the_first_packet_of_a_stream_holds_its_first_words(running: Running) -> None:
    body = {"messages": talk("Hello."), "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
    with running.connect() as link:
        link.sendall(request_bytes("/v1/chat/completions", body))
        first = link.recv(1 << 16)
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b'"role":"assistant"' in first
    assert b'"delta":{"content":"' in first
