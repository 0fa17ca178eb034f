"""What happens on the wire: framing, slowness, and clients that go away (cases by their number)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import socket
import statistics
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h11
import pytest

from beheld.server.http_protocol import MAX_TINY_CHUNKS, MIN_CHUNK_BYTES, BoundedConnection
from beheld.utils.pace import MIN_RATE
from tests import long
from tests.server.running import Running, data_url, received, request_bytes, talk, watched
from tests.server.slowness import best, p99, slowness

CHAT = "/v1/chat/completions"
LONG = {"messages": talk("Go on."), "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(autouse=True)
def _undisturbed(running: Running) -> Iterator[None]:
    """After every case the server is as before, and holds no connection more."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    running.idle()
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before + 2:
        assert time.monotonic() < deadline, "descriptors were lost"
        time.sleep(0.05)


GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
FRAMING = {
    "length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "length in words": POST + b"Content-Length: four\r\n\r\n",
    "bad chunk": POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "blank before the colon": GET + b"A : b\r\n\r\n",
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: y\r\n\r\n",
    "version 0.9": b"GET /version\r\n\r\n",
    "version 3": b"GET /version HTTP/3.0\r\nHost: x\r\n\r\n",
    "chunks in another coding": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "a length that is too long": POST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n",
    "a chunk that is too long": POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "junk method": b"G@T /version HTTP/1.1\r\nHost: x\r\n\r\n",
    "junk": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n",
    "large header": GET + b"A: " + b"x" * (1 << 20) + b"\r\n\r\n",
    "many headers": GET + b"".join(b"A%d: b\r\n" % k for k in range(10_000)) + b"\r\n",
}


@pytest.mark.parametrize("name", sorted(FRAMING))
def test_38_bad_framing_is_refused_and_ends_the_connection(running: Running, name: str) -> None:
    # What follows must never be taken for a request of its own.
    data = FRAMING[name] + GET + b"\r\n"
    with running.connect(2.0) as link:
        try:
            link.sendall(data)
        except ConnectionError:
            return
        answer = received(link)
    assert answer == b"" or answer[9:12] in (b"400", b"431"), answer[:200]
    assert b"200 OK" not in answer


def test_38_requests_in_a_row_are_answered_in_order(running: Running) -> None:
    data = (
        request_bytes("/tokenize", {"prompt": "a"}).replace(b"Connection: close\r\n", b"")
        + GET
        + b"Connection: close\r\n\r\n"
    )
    answer = running.raw(data)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b'"tokens"') < answer.index(b'"version"')


def test_38_forms_that_others_read_otherwise_mean_one_thing(running: Running) -> None:
    """A line that goes on in the next is one field, whatever the rest of it spells; an address with a host is a path
    that there is not."""
    folded = POST + b"A: b\r\n Content-Length: 4\r\n\r\n" + GET + b"Connection: close\r\n\r\n"
    answer = running.raw(folded)
    assert re.findall(rb"HTTP/1.1 (\d+) ", answer) == [b"400", b"200"], answer
    for target in (b"http://other.test/version", b"http://x/version", b"//x/version", b"*", b"x:443"):
        answer = running.raw(GET.replace(b"/version", target) + b"Connection: close\r\n\r\n" + GET + b"\r\n")
        assert re.findall(rb"HTTP/1.1 (\d+) ", answer) in ([b"404"], [b"400"]), (target, answer)


def chunked(path: str, body: bytes, size: int, *headers: str) -> bytes:
    """A POST whose body comes in chunks of so many bytes."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in _pieces(body, size))
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + chunks + b"0\r\n\r\n"


def _pieces(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


def late_s(running: Running, payload: bytes, status: bytes) -> float:
    """How late the event loop is at most while four clients send this, and get that status."""
    answers: list[bytes] = []

    def send() -> None:
        with running.connect(20.0) as link:
            # The server may have hung up before all is sent, in which case the answer may be lost with it.
            with contextlib.suppress(ConnectionError):
                link.sendall(payload)
            answers.append(received(link))

    clients = [threading.Thread(target=send) for _ in range(4)]
    with watched(running) as late:
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert all(answer[9:12] in (status, b"") for answer in answers), answers
    return max(late)


TINY = chunked("/tokenize", b" " * 300_000, 1)


def test_87_bodies_in_tiny_chunks_keep_nobody_waiting(running: Running) -> None:
    """Before there were turns the loop was held for 4 s by these, and as long as its clients liked by more."""
    assert running.raw(chunked("/tokenize", b" " * (MAX_TINY_CHUNKS + 64), 1)).startswith(b"HTTP/1.1 400")
    bound = 0.1 * slowness()
    assert best(lambda: late_s(running, TINY, b"400"), bound) < bound


def test_87_bodies_in_ordinary_chunks_are_read(running: Running) -> None:
    """A few tiny ones, as of software that sends what it writes piece by piece, and any number of larger ones. What
    follows in the same connection is answered too."""
    body = json.dumps({"prompt": "a", "model": None}).encode()
    for size, padded in (
        (1, body + b" " * 3_000),
        (MIN_CHUNK_BYTES, body + b" " * (2 << 20)),
        (70_000, body + b" " * (4 << 20)),
    ):
        answer = running.raw(chunked("/tokenize", padded, size) + GET + b"Connection: close\r\n\r\n")
        assert re.findall(rb"HTTP/1.1 (\d+) ", answer) == [b"200", b"200"], (size, answer)
        assert answer.index(b'"tokens"') < answer.index(b'"version"')


def test_87_long_trailers_are_refused(running: Running) -> None:
    head, trailers = TINY[: TINY.index(b"\r\n\r\n") + 4], b"0\r\n" + b"a: b\r\n" * 40_000 + b"\r\n"
    bound = 0.1 * slowness()
    assert best(lambda: late_s(running, head + trailers, b"431"), bound) < bound
    # h11 bounds only trailers whose end has not come yet; of those that come as a whole it would parse every line.
    before = set(running.server.server_state.connections)
    with running.connect() as link:
        link.sendall(head)
        until = time.monotonic() + 5
        while not (opened := set(running.server.server_state.connections) - before) and time.monotonic() < until:
            time.sleep(0.001)
        (protocol,) = opened
        assert running.server._loop is not None
        running.server._loop.call_soon_threadsafe(protocol.data_received, trailers)
        assert received(link)[9:12] == b"431"
    del protocol, opened, before


def test_88_without_the_key_nothing_of_a_body_is_parsed(locked: Running) -> None:
    """Its client is told at the headers. Before, every chunk was parsed, for two seconds of each connection."""
    bound = 0.1 * slowness()
    assert best(lambda: late_s(locked, TINY, b"401"), bound) < bound
    # One that waits for its answer has it, and one that sends on until its body ends has it too.
    for sent in (TINY[:1000], TINY, chunked("/tokenize", b" " * 5_000_000, 50_000)):
        begin = time.monotonic()
        assert locked.raw(sent).startswith(b"HTTP/1.1 401")
        assert time.monotonic() - begin < 2.5


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Without the garbage collector, so that what a cycle holds stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_what_a_connection_held_goes_with_it(locked: Running) -> None:
    """Not with the garbage collector's next round, before which an attack may hold a lot."""
    seen = []
    for sent in (GET + b"\r\n", TINY, b"GARBAGE\r\n\r\n", TINY[:1000]):
        # The server keeps a connection open whose request asks for nothing else, until its client goes.
        with locked.connect(1.0) as link:
            until = time.monotonic() + 5
            while not (open_ := list(locked.server.server_state.connections)):
                assert time.monotonic() < until
                time.sleep(0.001)
            seen += [weakref.ref(one) for one in open_]
            del open_
            with contextlib.suppress(ConnectionError):
                link.sendall(sent)
            received(link)
    deadline = time.monotonic() + 2
    while any(one() is not None for one in seen) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(seen) >= 4
    assert [one() for one in seen if one() is not None] == []


@pytest.mark.usefixtures("no_collection")
def test_a_connection_that_sent_no_http_leaves_no_cycle() -> None:
    """h11 raises its error in a method of the error, so that the traceback refers back to the error."""
    conn = BoundedConnection(h11.SERVER, 1000)
    conn.left = 1
    conn.receive_data(b"GARBAGE\r\n\r\n")
    held = weakref.ref(conn)
    with contextlib.suppress(h11.RemoteProtocolError):
        conn.next_event()
    assert conn.their_state is h11.ERROR
    del conn
    assert held() is None


def test_63_slow_headers_are_cut(running: Running) -> None:
    def cut(sent: bytes) -> tuple[bytes, float]:
        begin = time.monotonic()
        with running.connect(10.0) as link:
            link.sendall(sent)
            return received(link), time.monotonic() - begin

    parts = [b"", b"GE", GET, GET + b"A: b\r\n"]
    with ThreadPoolExecutor(len(parts)) as threads:
        for sent, (answer, spent) in zip(parts, threads.map(cut, parts), strict=True):
            assert b"408" in answer, sent
            assert 0.5 < spent < 3.0, sent


@pytest.mark.parametrize("part", ["headers", "body"])
def test_63_slow_clients_are_cut_while_others_are_served(running: Running, part: str) -> None:
    """Many that send a byte now and then (500 in the long form): each is told so when its time is up, and all of them
    within ten seconds. The slowest of some others takes no more than twice as long meanwhile. In the best of some
    rounds."""
    head, blank, _ = request_bytes("/tokenize", {"prompt": "a"}).partition(b"\r\n\r\n")
    sent = head.replace(b"Content-Length: 15", b"Content-Length: 500") + (blank if part == "body" else b"\r\nX: ")
    options = running.options
    allowed_s = {"headers": options.header_s, "body": options.body_s}[part]
    many = long.sized(50, 500)

    def text_s() -> float:
        begin = time.perf_counter()
        assert running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        return time.perf_counter() - begin

    def share_of_bounds() -> float:
        calm = p99([text_s() for _ in range(20)])
        begin = time.monotonic()
        links = [running.connect(20.0) for _ in range(many)]
        stop = threading.Event()

        def drip() -> None:
            # Faster than the case's byte in five seconds, but not so fast that it is the bytes that take the time.
            while not stop.wait(max(0.2, many / 250)):
                for link in links:
                    with contextlib.suppress(OSError):
                        link.send(b" ")

        dripping = threading.Thread(target=drip)
        try:
            for link in links:
                link.sendall(sent)
            dripping.start()
            beside = p99([text_s() for _ in range(20)])
            answers = [received(link) for link in links]
        finally:
            stop.set()
            if dripping.ident is not None:
                dripping.join()
            for link in links:
                link.close()
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers), answers[0][:200]
        spent = time.monotonic() - begin
        assert spent > allowed_s * 0.9, "each has its time"
        return max(beside / calm / 2.0, spent / 10.0)

    text_s()
    assert best(share_of_bounds, 1.0) <= 1.0


def test_63_a_body_may_take_its_time_as_long_as_it_comes(running: Running) -> None:
    """Longer than the time for one that does not come: as on a poor line, which carries more than MIN_RATE. A byte now
    and then is too slow."""

    def send(pause_s: float, piece: int) -> bytes:
        steps = int(2 * running.options.body_s / pause_s)
        body = json.dumps({"prompt": "a", "model": None}).encode() + b" " * (piece * steps)
        head, blank, _ = request_bytes("/tokenize", body).partition(b"\r\n\r\n")
        with running.connect(20.0) as link:
            link.sendall(head + blank + body[: -piece * steps])
            for _ in range(steps):
                time.sleep(pause_s)
                with contextlib.suppress(OSError):
                    link.sendall(b" " * piece)
            return received(link)

    with ThreadPoolExecutor(2) as threads:
        steady, slow = threads.submit(send, 0.1, 2 * int(0.1 * MIN_RATE)), threads.submit(send, 0.7, 1)
        assert steady.result().startswith(b"HTTP/1.1 200")
        assert slow.result().startswith(b"HTTP/1.1 408")


def test_62_a_client_that_does_not_read_is_dropped(running: Running) -> None:
    """At the time it has for that. Until then no more waits for it than two of the pieces in which answers are sent:
    the case's mebibyte would take longer to fill than the client has."""
    waiting: list[int] = []
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        link.connect(("127.0.0.1", running.port))
        many = LONG | {"stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}
        link.sendall(request_bytes(CHAT, many))
        assert link.recv(12) == b"HTTP/1.1 200"
        begin = time.monotonic()
        while running.admission.busy:
            assert time.monotonic() - begin < 30.0
            for connection in list(running.server.server_state.connections):
                waiting.append(connection.transport._inner.get_write_buffer_size())  # type: ignore[union-attr]
            time.sleep(0.01)
    assert 0 < max(waiting) <= 192 << 10, max(waiting)
    running.idle()


def hang_up(link: socket.socket, how: str) -> None:
    if how == "reset":
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "half":
        # The answer to a whole request still comes; only the end of the connection ends it.
        link.shutdown(socket.SHUT_WR)
        link.settimeout(0.1)
        with contextlib.suppress(OSError):
            link.recv(1)
    link.close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a picture at a server that takes connections and says nothing."""
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x.png"


# Phase -> (the share of the request that is sent, seconds until the client goes away, the answer is short).
PHASES = {
    "connect": (0.0, 0.0, False),
    "headers": (0.05, 0.0, False),
    "body": (0.5, 0.0, False),
    "decode or queue": (1.0, 0.0, False),
    "prefill": (1.0, 0.03, False),
    "decode step": (1.0, 0.1, False),
    "after the last token": (1.0, 0.1, True),
}
HOWS = ("close", "reset", "half")


def leave(running: Running, body: dict[str, Any], phase: str, how: str) -> None:
    """A client that goes away in a phase of its request."""
    share, delay, short = PHASES[phase]
    data = request_bytes(CHAT, body | ({"max_tokens": 1} if short else {}))
    with running.connect() as link:
        link.sendall(data[: int(share * len(data))])
        time.sleep(delay)
        hang_up(link, how)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_61_clients_that_go_away_leave_nothing(running: Running, silent: str, how: str, stream: bool, n: int) -> None:
    """In every phase: within a second, in the better of two rounds, all that they held is back. One asks with text, the
    other with pictures, a large picture or one that is being fetched."""
    pictures = {
        "close": [data_url(seed=3), data_url(seed=4)],
        "reset": [data_url(1200, 1200, seed=os.getpid() % 1000)],
        "half": [silent],
    }
    left: list[float] = []
    for urls in ([], pictures[how]):
        for phase in PHASES:
            leave(running, LONG | {"stream": stream, "n": n, "messages": talk("x", *urls)}, phase, how)
        begin = time.monotonic()
        running.idle(5.0)
        left.append(time.monotonic() - begin)
    assert min(left) < 1.0, left


@pytest.mark.skipif(not long.LONG, reason="long form")
@pytest.mark.slow
def test_61_long_form(running: Running, silent: str) -> None:
    """10,000 that go away, in every phase and way, streams or not, one answer or three, with and without pictures."""
    chance = random.Random(61)
    left: list[float] = []
    for number in range(long.sized(500, 10_000)):
        pictures = chance.choice(([], [], [], [data_url(seed=number % 50)], [silent]))
        body = LONG | {"stream": chance.random() < 0.5, "n": chance.choice((1, 3)), "messages": talk("x", *pictures)}
        # Most go away at once: the phases that take a while are for some.
        phase = chance.choice([*PHASES]) if number % 4 == 0 else chance.choice([*PHASES][:4])
        leave(running, body, phase, chance.choice(HOWS[:2] if number % 50 else HOWS))
        if number % 250 == 249:
            begin = time.monotonic()
            running.idle(5.0)
            left.append(time.monotonic() - begin)
    assert statistics.median(left) < 1.0, left


def test_61_others_are_not_disturbed(running: Running) -> None:
    calm = running.post(CHAT, LONG | {"max_tokens": 200}).json()["choices"][0]["message"]["content"]
    found: list[str] = []

    def ask() -> None:
        found.append(running.post(CHAT, LONG | {"max_tokens": 200}).json()["choices"][0]["message"]["content"])

    beside = threading.Thread(target=ask)
    beside.start()
    for _ in range(20):
        link = running.connect()
        link.sendall(request_bytes(CHAT, LONG | {"stream": True, "n": 3, "messages": talk("y", data_url(seed=9))}))
        time.sleep(0.02)
        hang_up(link, "reset")
    beside.join()
    assert found == [calm]


def test_65_beyond_the_bound_clients_are_told_to_come_back() -> None:
    small = Running("llama", max_requests=4)
    try:
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
        statuses: list[int] = []
        lock = threading.Lock()

        def ask() -> None:
            answer = small.post("/v1/completions", body)
            with lock:
                statuses.append(answer.status_code)
                if answer.status_code == 503:
                    assert answer.headers["retry-after"] == "1"
                    assert answer.json()["error"]["remedy"]

        threads = [threading.Thread(target=ask) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 503}
        assert statuses.count(200) >= 4
        small.idle()
        assert small.post("/v1/completions", body | {"max_tokens": 1}).status_code == 200
    finally:
        small.close()


def test_73_an_engine_that_dies_is_told_of(running: Running) -> None:
    doomed = Running("llama")
    try:
        with doomed.connect(10.0) as link:
            body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            link.sendall(request_bytes("/v1/completions", body))
            assert link.recv(200).startswith(b"HTTP/1.1 200")

            def broken(*_: object) -> None:
                raise AssertionError("for the test")

            doomed.llm._engine._core.scheduler.schedule = broken  # type: ignore[attr-defined]
            begin = time.monotonic()
            rest = received(link)
        assert time.monotonic() - begin < 2.0
        events = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_dead"
        assert doomed.get("/health").status_code == 503
        answer = doomed.post("/v1/completions", {"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    finally:
        doomed.close()
