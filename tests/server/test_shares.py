"""One client takes all that there is, and others are served nevertheless (case 126)."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from beheld.server.admission import AdmissionControl, Places
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from tests.server.running import Running, received, request_bytes

pytestmark = pytest.mark.case(126)

COMPLETE = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 8}
OTHER = "127.0.0.2"


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A server with 32 answers, 384 connections, and room for four bodies."""
    found = Running("llama", max_requests=32, max_body_bytes=1 << 20, max_reading_bytes=4 << 20, body_s=10.0)
    yield found
    found.close()


@pytest.fixture
def links(small: Running) -> Iterator[list[socket.socket]]:
    """What the greedy client has opened."""
    opened: list[socket.socket] = []
    yield opened
    for link in opened:
        link.close()
    small.idle()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def asked(small: Running, data: bytes, source: str = "") -> bytes:
    """The head of the answer."""
    with small.connect(source=source) as link:
        link.sendall(data)
        return received(link)[:12]


def test_who_takes_all_answers_leaves_some(small: Running, links: list[socket.socket]) -> None:
    for _ in range(4):
        links.append(small.connect())
        links[-1].sendall(request_bytes(COMPLETE, LONG))
    until(lambda: small.admission.busy == 32)
    short = request_bytes(COMPLETE, {"prompt": "x", "max_tokens": 1})
    assert asked(small, short) == b"HTTP/1.1 503"
    assert asked(small, short, OTHER) == b"HTTP/1.1 200"
    assert asked(small, request_bytes("/tokenize", {"prompt": "x"}), OTHER) == b"HTTP/1.1 200"
    assert small.admission.busy == 32


def test_who_takes_all_connections_leaves_some(small: Running, links: list[socket.socket]) -> None:
    links += [small.connect() for _ in range(small.options.max_connections + 1)]
    until(lambda: small.admission.connections.taken == small.options.max_connections + 1)
    get = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert asked(small, get) == b"HTTP/1.1 503"
    assert asked(small, get, OTHER) == b"HTTP/1.1 200"


def test_far_too_many_connections_are_closed(small: Running, links: list[socket.socket]) -> None:
    most = 2 * small.options.max_connections
    links += [small.connect() for _ in range(most + 20)]
    until(lambda: small.admission.connections.taken <= most)
    with small.connect() as link, contextlib.suppress(ConnectionError):
        assert link.recv(1) == b""
    with small.connect(source=OTHER) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert received(link)[:12] == b"HTTP/1.1 200"


def test_who_sends_as_much_as_may_be_sent_leaves_room(small: Running, links: list[socket.socket]) -> None:
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {1 << 20}\r\n\r\n"
    for _ in range(3):
        links.append(small.connect())
        links[-1].sendall(head.encode() + b" " * ((1 << 20) - 1))
    until(lambda: small.admission.held_bytes > 2_900_000 - 3 * (64 << 10))
    large = request_bytes("/tokenize", b'{"prompt": "x"}' + b" " * 1_000_000)
    assert asked(small, large) == b"HTTP/1.1 503"
    assert asked(small, large, OTHER) == b"HTTP/1.1 200"


def test_places() -> None:
    places = Places(32)
    places.take("greedy", 32)
    assert not places.free("greedy", 1)
    assert not places.free("", 1)
    # A client has few up to two, and there are eight for such clients.
    for client in "abcd":
        assert places.free(client, 2)
        assert not places.free(client, 3)
        places.take(client, 2)
    assert not places.free("e", 1)
    places.give("a", 2)
    assert places.free("e", 1)
    places.give("greedy", 32)
    # Without others, one request may be larger than all.
    for client in "bcd":
        places.give(client, 2)
    assert places.free("greedy", 40)
    assert places.taken == 0
    assert not places._taken_by


def test_columns_of_one_client_leave_a_fourth() -> None:
    admission = AdmissionControl(ServerOptions(max_body_bytes=1 << 20, max_reading_bytes=8 << 20))
    with pytest.raises(HttpError, match="6 MiB of one client"):
        admission.hold_columns(7 << 20, client="greedy")
    with admission.hold_columns(6 << 20, client="greedy"):
        with pytest.raises(HttpError, match="of yours"):
            admission.hold_columns(1 << 20, client="greedy")
        admission.hold_columns(1 << 20, client="other").release()
    assert admission.held_bytes == 0
    assert not admission._held_by
    # Where all are one client it may have all.
    admission.hold_columns(7 << 20).release()
