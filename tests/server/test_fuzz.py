"""Made-up traffic: requests after the OpenAPI document, broken bytes, and all refusals in any order (by number)."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from schemathesis import GenerationMode

from tests.long import sized
from tests.server import fuzzing, test_http_protocol, test_refusals
from tests.server.fuzzing import OPERATIONS
from tests.server.running import PAGES, Running, received, request_bytes, talk

EXAMPLES = sized(25, 400)
# Other names of a route have the same handler and the same schema.
FUZZED = [operation for operation in OPERATIONS if operation.path not in fuzzing.ALIASES]
MESSAGES = sized(600, 100_000)


@pytest.fixture(autouse=True)
def _undisturbed(running: Running) -> Iterator[None]:
    """After every case the server is as before."""
    yield
    running.idle(20.0)


# ---------------------------------------------------------------------- the document


def test_81_the_document_names_every_route(running: Running) -> None:
    told = {(operation.method.upper(), operation.path) for operation in OPERATIONS}
    there = {
        (method, route.path.replace("{name:path}", "{name}"))  # type: ignore[attr-defined]
        for route in running.app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        if route.path not in PAGES  # type: ignore[attr-defined]
    }
    assert told == there


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", FUZZED, ids=lambda operation: operation.label)
def test_81_requests_after_the_document(running: Running, operation: Any, mode: GenerationMode) -> None:
    fuzzing.check(running.url, operation, mode, EXAMPLES)


# ---------------------------------------------------------------------- bytes

WHOLE = [
    request_bytes("/tokenize", {"prompt": "a"}),
    request_bytes("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}),
    request_bytes("/v1/chat/completions", {"messages": talk("a"), "max_tokens": 1}, "Expect: 100-continue"),
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n" * 3,
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'f\r\n{"prompt": "x"}\r\n0\r\n\r\n',
]
PIECES = [
    b"\r\n", b"\n", b"\r", b"\0", b": ", b" ", b"\t", b"\xff\xfe", b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n",
    b"Content-Length: 0\r\n", b"Content-Length: 99999\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b"HTTP/1.0", b"HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"%00",
    b"/../", b";",
]  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The same with a few bytes changed, cut, doubled or put in."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(made) + 1)
        way = rng.randrange(5)
        if way == 0:
            made[place:place] = rng.choice(PIECES)
        elif way == 1:
            del made[place : place + rng.randint(1, 12)]
        elif way == 2 and place < len(made):
            made[place] = rng.randrange(256)
        elif way == 3:
            made[place:place] = made[place : place + rng.randint(1, 60)]
        else:
            made[place:place] = rng.randbytes(rng.randint(1, 8))
    return bytes(made)


def test_84_broken_bytes_end_nothing_but_their_connection(running: Running) -> None:
    rng = random.Random(84)
    answered = 0
    for number in range(MESSAGES):
        data = mutated(rng.choice(WHOLE), rng)
        link = socket.create_connection(("127.0.0.1", running.port), timeout=0.01)
        with link:
            try:
                for start in range(0, len(data), 200):
                    link.sendall(data[start : start + 200])
                link.settimeout(0.02)
                found = received(link)
            except OSError:
                continue
        answered += bool(found)
        status = found[9:12]
        assert not found or (found.startswith(b"HTTP/1.1 ") and status < b"500"), (data, found[:300])
        if number % 100 == 99:
            assert running.get("/health").status_code == 200
    assert answered > MESSAGES // 10


# ---------------------------------------------------------------------- order


def verdicts() -> Iterator[tuple[str, bytes, bytes]]:
    """(name, bytes, the statuses that are right) of the refusals of the other files."""
    complete, chat = "/v1/completions", "/v1/chat/completions"
    for name, (body, statuses) in test_refusals.JSON_ABUSE.items():
        if len(body) < 1 << 20:
            yield f"json {name}", request_bytes(complete, body), statuses
    for name, values in test_refusals.NUMBERS.items():
        for value in values:
            if value is not None and value != 10**400:
                yield f"{name} {value}", request_bytes(complete, {"prompt": "x", "max_tokens": 2, name: value}), b"400"
    for name, value in test_refusals.INTERNAL.items():
        yield name, request_bytes(chat, {"messages": talk(), name: value}), b"400"
    for name, data in test_http_protocol.FRAMING.items():
        if len(data) < 1 << 16:
            yield f"framing {name}", data, b"400 431"
    for number in range(4):
        yield f"good {number}", request_bytes(complete, {"prompt": "x" * number + "y", "max_tokens": 2}), b"200"
        yield f"models {number}", b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"


def test_85_in_any_order_the_verdicts_are_the_same(running: Running) -> None:
    table = list(verdicts())
    assert len(table) > 100
    for number in range(3):
        random.Random(number).shuffle(table)
        for name, data, statuses in table:
            with running.connect(5.0) as link:
                try:
                    link.sendall(data)
                    link.settimeout(5.0)
                    found = link.recv(4096)
                except ConnectionError:
                    found = b""
            if not (found == b"" and name.startswith("framing")):
                assert found[9:12] in statuses.split(), (name, found[:300])
