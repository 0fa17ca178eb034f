"""What connections keep in the server's memory: answers that are not read, requests that are not parsed (case 139)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from beheld.server import http_protocol
from beheld.utils import log
from tests.server.running import Running, received, request_bytes
from tests.server.test_reach import certificates, needs_openssl
from tests.server.test_shares import until

__all__ = ["certificates"]

pytestmark = pytest.mark.case(139)

MIB = 1 << 20
# Of connections of a server whose bodies may have four mebibytes together.
MOST = 2 * MIB
OTHER = "127.0.0.2"


@pytest.fixture
def small() -> Iterator[Running]:
    found = Running("llama", max_body_bytes=1 * MIB, max_reading_bytes=4 * MIB, send_s=20.0, header_s=20.0)
    yield found
    found.close()


def unread(running: Running, path: str) -> socket.socket:
    """A connection whose client asks for a large answer and has no room for it."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    link.settimeout(5)
    link.connect(("127.0.0.1", running.port))
    link.sendall(got(path))
    return link


def got(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


def large_answer(running: Running) -> tuple[str, bytes]:
    """The path of a large document, and the document."""
    tools = [{"type": "function", "name": f"f{n}", "description": "x" * 60_000} for n in range(15)]
    body = {"input": "a", "max_output_tokens": 1, "tools": tools, "tool_choice": "none"}
    path = f"/v1/responses/{running.post('/v1/responses', body).json()['id']}"
    document = running.get(path).content
    assert len(document) > 900_000
    return path, document


def test_answers_that_nobody_reads_have_a_bound(small: Running) -> None:
    path, document = large_answer(small)
    buffers = small.admission.buffers
    assert buffers.most == MOST
    # The server sees a little later than the client that all was read.
    until(lambda: buffers.taken == 0)
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(unread(small, path)) for _ in range(20)]
        until(lambda: buffers.taken > MOST // 2)
        time.sleep(0.5)
        assert buffers.taken <= MOST
        with small.connect(source=OTHER) as other:
            other.sendall(got(path))
            assert received(other).endswith(document)
        # Who reads after all gets the whole answer, or a connection that was cut.
        whole = sum(received(link).endswith(document) for link in links)
        assert 0 < whole < len(links)
    until(lambda: buffers.taken == 0)
    small.idle()


def test_who_reads_slowly_but_on_has_the_whole_answer() -> None:
    """However long it takes. The time for all of an answer that was written at once was bounded."""
    running = Running("llama", max_body_bytes=1 * MIB, max_reading_bytes=4 * MIB, send_s=1.0, header_s=20.0)
    try:
        path, document = large_answer(running)
        with unread(running, path) as link:
            begun, read = time.monotonic(), 0
            while piece := link.recv(1 << 16):
                read += len(piece)
                # 250 KB/s.
                time.sleep(max(0.0, begun + read / 250_000 - time.monotonic()))
        assert read > len(document)
        assert time.monotonic() - begun > 3.0
        running.idle()
    finally:
        running.close()


def test_requests_that_wait_to_be_parsed_have_a_bound(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn of a connection parses some 48 of its chunks; a hundred connections wait with 200 KiB each."""
    buffers = small.admission.buffers
    chunks = b"1\r\n \r\n" * (200 * 1024 // 6)
    sent = request_bytes("/v1/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + chunks
    statuses = set[bytes]()
    taken, loop, take = [0], small.server._loop, buffers.take
    assert loop is not None

    def seen(client: str, count: int = 1) -> None:
        take(client, count)
        taken.append(buffers.taken)

    monkeypatch.setattr(buffers, "take", seen)
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(small.connect()) for _ in range(100)]
        # What comes in one piece is larger if the loop is late.
        loop.call_soon_threadsafe(time.sleep, 0.3)
        for link in links:
            link.setblocking(False)
            with contextlib.suppress(OSError):
                link.send(sent)
        for link in links:
            link.settimeout(5)
            statuses.add(received(link)[9:12])
    assert MOST // 2 < max(taken) <= MOST
    assert b"503" in statuses
    until(lambda: buffers.taken == 0)
    small.idle()


def test_headers_that_do_not_end_have_a_bound(small: Running) -> None:
    buffers = small.admission.buffers
    begun = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (31 << 10)
    with contextlib.ExitStack() as opened:
        links = [opened.enter_context(small.connect()) for _ in range(100)]
        for link in links:
            link.sendall(begun)
        until(lambda: buffers.taken > MOST - 2 * len(begun))
        time.sleep(0.2)
        assert buffers.taken <= MOST
        # Others, whose headers come in two pieces, have room.
        with small.connect(source=OTHER) as other:
            other.sendall(begun[:1000])
            time.sleep(0.1)
            other.sendall(b"\r\nConnection: close\r\n\r\n")
            assert received(other).startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 503" in {received(link)[:12] for link in links[-10:]}
    until(lambda: buffers.taken == 0)
    small.idle()


def test_of_clients_without_names_those_are_cut_that_read_nothing_for_longest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a Unix socket. The next one that paused was cut, however soon it went on, and without a line."""
    monkeypatch.setattr(log, "_said", set())
    running = Running(
        "llama", max_body_bytes=1 * MIB, max_reading_bytes=4 * MIB, send_s=20.0, header_s=20.0, fair_shares=False
    )
    try:
        path, document = large_answer(running)
        buffers = running.admission.buffers
        until(lambda: buffers.taken == 0)
        with contextlib.ExitStack() as opened, caplog.at_level(logging.WARNING, "beheld"):
            links = [opened.enter_context(unread(running, path)) for _ in range(20)]
            until(lambda: buffers.taken > MOST // 2)
            time.sleep(0.5)
            for _ in range(3):
                other = opened.enter_context(unread(running, path))
                time.sleep(0.2)
                assert received(other).endswith(document)
            assert buffers.taken <= MOST
            assert not received(links[0]).endswith(document)
        assert sum("unread" in line for line in caplog.messages) == 1
        until(lambda: buffers.taken == 0)
        running.idle()
    finally:
        running.close()


@needs_openssl
def test_over_tls_answers_that_nobody_reads_are_counted_and_timed(certificates: Path) -> None:
    """asyncio took them into the transport below and called nothing unsent."""
    files = {"ssl_certfile": str(certificates / "server.pem"), "ssl_keyfile": str(certificates / "server.key")}
    running = Running("llama", max_body_bytes=1 * MIB, max_reading_bytes=4 * MIB, send_s=1.5, **files)  # type: ignore[arg-type]
    context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
    try:
        path, document = large_answer(running)
        buffers, open_ = running.admission.buffers, running.server.server_state.connections
        until(lambda: buffers.taken == 0 and not open_)
        for tail in ("Connection: close\r\n", ""):
            with unread_tls(running, context) as link:
                link.sendall(got(path).replace(b"Connection: close\r\n", tail.encode()))
                until(lambda: buffers.taken > len(document) // 4)
                begun = time.monotonic()
                until(lambda: not open_)
                assert 1.0 < time.monotonic() - begun < 4.0
            until(lambda: buffers.taken == 0)
        # Who reads slowly, and reads on, has it all.
        with unread_tls(running, context) as link:
            link.sendall(got(path))
            time.sleep(0.5)
            assert received(link).endswith(document)
        until(lambda: buffers.taken == 0)
        running.idle()
    finally:
        running.close()


def unread_tls(running: Running, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection whose client has no room for a large answer."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    link.settimeout(5)
    link.connect(("127.0.0.1", running.port))
    return context.wrap_socket(link, server_hostname="127.0.0.1")


def test_a_request_that_comes_before_its_turn_is_counted(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """h11 keeps what comes before the answer to the last request; only headers that were not whole were counted."""
    buffers, loop = small.admission.buffers, small.server._loop
    assert loop is not None
    asked, may_go_on = threading.Event(), asyncio.Event()

    async def waits(*_: object, **__: object) -> list[int]:
        asked.set()
        await may_go_on.wait()
        return [1]

    monkeypatch.setattr(small.llm, "token_ids", waits)
    first = request_bytes("/tokenize", {"prompt": "x"}).replace(b"Connection: close\r\n", b"")
    second = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: " + b"x" * 20_000 + b"\r\n\r\n"
    with small.connect(20.0) as link:
        link.sendall(first)
        assert asked.wait(20)
        assert buffers.taken == 0
        link.sendall(second)
        until(lambda: buffers.taken == len(second))
        loop.call_soon_threadsafe(may_go_on.set)
        assert received(link).count(b"HTTP/1.1 200") == 2
    until(lambda: buffers.taken == 0)
    small.idle()


def test_what_is_dropped_is_not_counted(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a body in tiny chunks that is answered early; what was not parsed yet counted until the connection ended."""
    buffers = small.admission.buffers
    monkeypatch.setattr(http_protocol, "_SILENCE_S", 2.0)
    head = b"POST /none HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with small.connect() as link:
        link.sendall(head + b"1\r\n \r\n" * 20_000)
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 404")
        begun = time.monotonic()
        # What h11 has taken it keeps.
        until(lambda: buffers.taken <= http_protocol.MAX_HEADER_BYTES)
        assert time.monotonic() - begun < 1.5
    until(lambda: buffers.taken == 0)
    small.idle()
