"""What connections keep in the server's memory: answers that are not read, requests that are not parsed (case 139)."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tests.server.running import Running, received, request_bytes
from tests.server.test_shares import until

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


def test_answers_that_nobody_reads_have_a_bound(small: Running) -> None:
    tools = [{"type": "function", "name": f"f{n}", "description": "x" * 60_000} for n in range(15)]
    body = {"input": "a", "max_output_tokens": 1, "tools": tools, "tool_choice": "none"}
    path = f"/v1/responses/{small.post('/v1/responses', body).json()['id']}"
    document = small.get(path).content
    assert len(document) > 900_000
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
