"""Turns at the event loop (case 127): many requests at once are begun one by one, clients by turns."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from beheld.server import limits, openapi
from beheld.server.listen import listen
from beheld.server.options import ServerOptions
from beheld.server.parse_turns import ParseTurns
from beheld.server.read import Reader
from beheld.server.request_turns import RequestTurns
from beheld.utils import loop_share
from beheld.utils.loop_share import LoopShare
from tests.server.running import Running, received, request_bytes, watched
from tests.server.slowness import best, slowness

pytestmark = pytest.mark.case(127)


def test_one_begins_in_each_turn_of_the_loop_and_clients_take_turns() -> None:
    async def story() -> tuple[list[str], list[int]]:
        turns, order, when, now = RequestTurns(), list[str](), list[int](), 0

        async def one(client: str) -> None:
            await turns.take(client)
            order.append(client)
            when.append(now)

        tasks = [asyncio.ensure_future(one(client)) for client in "aaaaabbc"]
        await asyncio.sleep(0)
        tasks[3].cancel()
        while not all(task.done() for task in tasks):
            now += 1
            await asyncio.sleep(0)
        # Who comes alone does not wait.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        alone = asyncio.ensure_future(one("d"))
        await asyncio.sleep(0)
        assert alone.done()
        return order, when

    order, when = asyncio.run(story())
    assert "".join(order) == "aabcabad"
    assert all(later > earlier for earlier, later in pairwise(when[:-1]))


@pytest.mark.parametrize("late", [False, True], ids=["small and whole", "large, after their headers"])
def test_in_one_turn_of_the_loop_one_body_is_parsed(
    running: Running, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """64 clients' bodies of 32 KiB that arrived together held the loop for a third of a second."""
    loop = running.server._loop
    assert loop is not None
    turns, parsed, stop = 0, list[int](), threading.Event()
    real = Reader._parsed

    def tick() -> None:
        nonlocal turns
        turns += 1
        if not stop.is_set():
            loop.call_soon(tick)

    def counted(*arguments: Any) -> Any:
        parsed.append(turns)
        return real(*arguments)

    monkeypatch.setattr(Reader, "_parsed", counted)
    sent = request_bytes("/v1/chat/completions", {"messages": [], "x": "a" * (30_000 if late else 100)})
    cut = sent.index(b"{") if late else 0
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(running.connect()) for _ in range(20)]
        for link in links:
            link.sendall(sent[:cut])
        time.sleep(0.2)
        loop.call_soon_threadsafe(tick)
        loop.call_soon_threadsafe(time.sleep, 0.2)
        time.sleep(0.02)
        for link in links:
            link.sendall(sent[cut:])
        assert {received(link)[9:12] for link in links} == {b"400"}
        stop.set()
    assert len(parsed) == len(set(parsed)) == 20
    running.idle()


def test_a_connection_that_fails_keeps_no_other_waiting() -> None:
    """The others are parsed, whether the failure is in a header or in a piece of a body, and the loop reports it."""

    async def story() -> tuple[list[str], int]:
        turns, share, done, errors = ParseTurns(1), LoopShare(), list[str](), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

        def fails() -> None:
            raise MemoryError

        assert turns.take("a", fails)
        turns.take("b", fails)
        turns.take("c", lambda: done.append("parsed"))
        share.do(fails)
        share.do(lambda: done.append("piece"))
        await asyncio.sleep(0.1)
        if turns.take("d", lambda: done.append("later")):
            done.append("later")
        await asyncio.sleep(0.01)
        return done, len(errors)

    assert asyncio.run(story()) == (["parsed", "piece", "later"], 2)


@pytest.mark.case(140)
def test_some_connections_are_parsed_in_each_turn_of_the_loop_and_clients_take_turns() -> None:
    async def story() -> list[tuple[int, str]]:
        turns, parsed, now = ParseTurns(3), list[tuple[int, str]](), 0

        def come(client: str) -> None:
            if turns.take(client, lambda: parsed.append((now, client))):
                parsed.append((now, client))

        for client in "aaaaaaaab":
            come(client)
        for _ in range(2):
            now += 1
            await asyncio.sleep(0)
            # Who waits already is not passed by its own.
            come("a")
        come("c")
        while len(parsed) < 12:
            now += 1
            assert now < 20
            await asyncio.sleep(0)
        return parsed

    parsed = asyncio.run(story())
    assert all(sum(turn == now for turn, _ in parsed) <= 3 for now in range(20))
    assert "".join(client for _, client in parsed[:5]) == "aaaab"
    assert next(place for place, (_, client) in enumerate(parsed) if client == "c") <= 10


@pytest.mark.case(140)
def test_a_body_of_known_length_takes_a_turn_for_so_many_bytes(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece took one, and the pieces of TLS have 32 KiB: 24 clients sent 29 MB/s together. Pieces of chunks take
    one each, as before."""
    turns: list[str] = []
    take = ParseTurns.take

    def counted(self: ParseTurns, *arguments: Any) -> bool:
        turns.append("")
        return take(self, *arguments)

    monkeypatch.setattr(ParseTurns, "take", counted)
    loop, piece = running.server._loop, b" " * (32 << 10)
    assert loop is not None

    async def hand_over(protocol: Any, one: bytes) -> None:
        protocol.data_received(one)

    def sent(head: bytes, pieces: list[bytes]) -> int:
        """Turns of these pieces."""
        before = set(running.server.server_state.connections)
        with running.connect() as link:
            link.sendall(head)
            while not (opened := set(running.server.server_state.connections) - before):
                time.sleep(0.001)
            time.sleep(0.1)
            (protocol,) = opened
            turns.clear()
            for one in pieces:
                come = asyncio.run_coroutine_threadsafe(hand_over(protocol, one), loop)
                come.result(10)
            assert received(link)[9:12] == b"200"
            return len(turns)

    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    body = b'{"prompt": "a"}'
    whole = [*[piece] * 32, body]
    length = b"Content-Length: %d\r\n\r\n" % sum(map(len, whole))
    assert sent(head + length, whole) == 4
    chunks = [b"1\r\n \r\n"] * 32
    assert sent(head + b"Transfer-Encoding: chunked\r\n\r\n", [*chunks, b"f\r\n" + body + b"\r\n0\r\n\r\n"]) == 33


@pytest.mark.case(140)
def test_a_thousand_connections_that_ask_at_once_keep_nobody_waiting(running: Running) -> None:
    """Each had its turn in the same turn of the loop, which took as long as all of them."""
    sent = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(running.connect(20.0)) for _ in range(300)]
        for link in links:
            link.sendall(sent)
            assert link.recv(12) == b"HTTP/1.1 200"
            link.recv(1 << 16)

        def late_s() -> float:
            loop = running.server._loop
            assert loop is not None
            with watched(running) as late:
                # All are ready when the loop goes on.
                loop.call_soon_threadsafe(time.sleep, 0.1)
                for link in links:
                    link.sendall(sent)
                for link in links:
                    assert link.recv(12) == b"HTTP/1.1 200"
                    link.recv(1 << 16)
            return max(late) - 0.1

        bound = 0.03 * slowness()
        assert best(late_s, bound) < bound
    running.idle()


@pytest.mark.case(141)
def test_requests_in_a_row_begin_in_turns_too(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer's end let the next request of its connection begin in the same turn of the loop: hundreds did."""
    loop, config = running.server._loop, running.server.config
    assert loop is not None
    real, turns, begun, stop = config.loaded_app, 0, Counter[int](), threading.Event()

    def tick() -> None:
        nonlocal turns
        turns += 1
        if not stop.is_set():
            loop.call_soon(tick)

    async def counted(*given: Any) -> None:
        begun[turns] += 1
        await real(*given)

    monkeypatch.setattr(config, "loaded_app", counted)
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(running.connect(20.0)) for _ in range(60)]
        time.sleep(0.2)
        loop.call_soon_threadsafe(tick)
        loop.call_soon_threadsafe(time.sleep, 0.2)
        request = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n"
        for link in links:
            link.sendall((request + b"\r\n") * 3 + request + b"Connection: close\r\n\r\n")
        assert {received(link).count(b"HTTP/1.1 404") for link in links} == {4}
        stop.set()
    assert sum(begun.values()) == 240
    # The first of each connection by turns of some, the others one by one.
    assert max(begun.values()) < 20
    running.idle()


@pytest.mark.case(141)
def test_requests_in_a_row_are_answered_after_their_client_has_closed_its_side(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection whose next request waits for its turn is not closed, and its last answer is sent before it is."""
    monkeypatch.setattr(running.server.config.http_protocol_class, "parse_turns", ParseTurns(1))
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(running.connect(2.0)) for _ in range(8)]
        for link in links:
            link.sendall(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5)
            link.shutdown(socket.SHUT_WR)
        assert {received(link).count(b"HTTP/1.1 404") for link in links} == {5}
    running.idle()


@pytest.mark.case(141)
def test_a_connection_that_is_lost_waits_for_no_turn(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next request did: clients that came, had one answer and went left a thousand connections a second in memory,
    and other clients' requests waited behind them."""
    monkeypatch.setattr(loop_share, "_REST_S", 1.0)
    monkeypatch.setattr(running.server.config.http_protocol_class, "turns", LoopShare())
    before = set(running.server.server_state.connections)
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(running.connect()) for _ in range(20)]
        for link in links:
            link.sendall(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        for link in links:
            assert link.recv(12) == b"HTTP/1.1 404"
        assert len(set(running.server.server_state.connections) - before) == 20
        for link in links:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # Fewer turns than there are connections, of which those that are gone take none.
    deadline = time.monotonic() + 12.0
    while kept := set(running.server.server_state.connections) - before:
        assert time.monotonic() < deadline, f"{len(kept)} are kept"
        time.sleep(0.01)
    running.idle()


def test_the_document_is_written_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 clients that asked for it at once held /health for two seconds."""
    first = running.get("/openapi.json")
    assert first.json()["openapi"].startswith("3.")
    monkeypatch.setattr(openapi, "document", None)
    assert running.get("/openapi.json").content == first.content
    assert first.headers["content-type"] == "application/json"


def test_as_many_connections_wait_as_the_system_allows(running: Running) -> None:
    """Else the system drops what a flood leaves no room for, and others try again after a second."""

    def queue(listener: socket.socket) -> int:
        # Of struct tcp_info of a socket that listens: tcpi_sacked.
        return int(struct.unpack_from("=I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 28)[0])

    with open("/proc/sys/net/core/somaxconn", encoding="ascii") as file:
        allowed = int(file.read())
    assert queue(running.listener) == min(4096, allowed)
    with listen(ServerOptions(port=0)) as other:
        assert queue(other) == min(4096, allowed)


@pytest.mark.case(128)
def test_a_template_has_so_many_variables_and_no_more(running: Running) -> None:
    """40,000 of them held /health for a second."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    most = {f"a{number}": 1 for number in range(limits.MAX_VARIABLES)}
    assert running.post("/v1/chat/completions", {**body, "chat_template_kwargs": most}).status_code == 200
    refused = running.post("/v1/chat/completions", {**body, "chat_template_kwargs": {**most, "b": 1}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"
