"""What one body may cost the others: bounds before work, work beside the event loop, answers before the body."""

from __future__ import annotations

import json
import logging
import socket
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from beheld.cli.serve import fit_bodies
from beheld.platform import host
from beheld.server import chat_messages, limits
from beheld.server.admission import AdmissionControl
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.read import checked, parse
from beheld.server.schema import ChatRequest, CompletionRequest, Message
from tests.memory import peak
from tests.server.running import Running, data_url, received, request_bytes, talk, watched
from tests.server.slowness import best, slowness

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


# ---------------------------------------------------------------------- counting


@pytest.mark.case(37)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{" + b",".join(b'"k%d" :1' % k for k in range(60_000)) + b"}", "keys"),
        (b"{" + b",".join(b'"k%d"\n\t:1' % k for k in range(60_000)) + b"}", "keys"),
        (b'{"a":[' + b",".join([b"{}"] * 60_000) + b"]}", "lists and objects"),
        (b'{"a":[' + b",".join([b"1"] * 600_000) + b"]}", "values"),
        (b'{"a":[' + b",".join([b'"\\\\"'] * 600_000) + b"]}", "texts"),
        (b'{"a":' + b'""' * 600_000 + b"}", "not valid JSON"),
        (b'{"a":' + b"9" * 4000 + b"}", "digits"),
        (b'{"a":"' + b'\\":,[{' * 100_000, "not valid JSON"),
    ],
)
def test_parts_are_counted_outside_of_texts(body: bytes, words: str) -> None:
    begin = time.thread_time()
    with pytest.raises(HttpError, match=words):
        parse(body)
    assert time.thread_time() - begin < 1.0


def test_marks_within_texts_are_no_parts() -> None:
    text = 'a: "b", \\ {[c]}\\\\ ' * 60_000
    value = {"prompt": text, "stop": ["\\", '"', ":"]}
    assert parse(json.dumps(value).encode()) == value


def test_at_the_bounds_bodies_are_read() -> None:
    keys = {str(k): k for k in range(limits.JSON.keys)}
    assert parse(json.dumps(keys).encode()) == keys
    ids = list(range(limits.JSON.values))
    assert parse(json.dumps(ids).encode()) == ids
    with pytest.raises(HttpError):
        parse(json.dumps([*ids, 1, 1]).encode())
    assert len(parse(json.dumps([*ids, 1, 1]).encode(), replace(limits.JSON, values=2 * len(ids)))) == len(ids) + 2


@pytest.mark.case(36)
@pytest.mark.parametrize(
    ("kind", "value", "param"),
    [
        (CompletionRequest, {"prompt": [1.5] * 100_000}, "prompt.0"),
        (CompletionRequest, {"prompt": [1] * 1000 + [None] * 100_000}, "prompt.1000"),
        (CompletionRequest, {"prompt": ["a"] * 100_000}, "prompt"),
        (CompletionRequest, {"prompt": [[1]] * 100_000}, "prompt"),
        (CompletionRequest, {"prompt": "a", "allowed_token_ids": ["a"] * 100_000}, "allowed_token_ids.0"),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 100_000}, "stop.0"),
        (CompletionRequest, {"prompt": "a", **{f"k{k}": 1 for k in range(40_000)}}, "k0"),
        (ChatRequest, {"messages": [1] * 100_000}, "messages.0"),
        (ChatRequest, {"messages": [{"role": "user", "content": ["x"] * 100_000}]}, "messages.0.content.0"),
        # As many notes are accepted as one request may have.
        (
            ChatRequest,
            {"messages": [{"role": "user", **{f"k{k}": 1 for k in range(40_000)}}]},
            f"messages.0.k{limits.MAX_NOTES}",
        ),
    ],
)
def test_one_error_instead_of_a_hundred_thousand(kind: Any, value: Any, param: str) -> None:
    begin = time.thread_time()
    with pytest.raises(HttpError) as caught:
        checked(value, kind)
    assert time.thread_time() - begin < 0.3
    assert caught.value.param == param
    assert caught.value.remedy
    assert len(caught.value.reason) < 500


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_92_a_key_of_megabytes_is_compared_with_none(kind: Any) -> None:
    """The search for the nearest name took 11 s and 2.5 GiB of one of 60 MiB."""

    value = {"m" * (8 << 20): 1}
    begin = time.thread_time()
    with peak() as above, pytest.raises(HttpError, match="is unknown") as caught:
        checked(value, kind)
    assert above[0] < 4 << 20
    assert len(str(caught.value.body())) < 1000
    assert time.thread_time() - begin < 0.2 * slowness(time.thread_time)
    with pytest.raises(HttpError) as caught:
        checked({"max_tokns": 1}, kind)
    assert "'max_tokens'" in caught.value.remedy


def test_many_ids_are_checked_fast() -> None:
    begin = time.thread_time()
    body = checked({"prompt": [151_643] * 500_000, "allowed_token_ids": [5] * 500_000}, CompletionRequest)
    assert time.thread_time() - begin < 1.0
    assert len(body.prompt) == 500_000


@pytest.mark.case(36)
def test_a_body_of_many_parts_keeps_nobody_waiting(running: Running) -> None:
    bodies = [
        (0.05, b'{"prompt":[' + b",".join([b"1.5"] * 400_000) + b"]}"),
        (0.05, b'{"prompt":"a","max_tokens":1,"allowed_token_ids":[' + b",".join([b"5"] * 400_000) + b"]}"),
        # Names of fields are made into objects in one call, which keeps the interpreter for some 50 ms.
        (0.2, b"{" + b",".join(b'"k%d" :1' % k for k in range(500_000)) + b"}"),
    ]
    for late_at_most_s, body in bodies:
        sent = request_bytes(COMPLETE, body)

        def late_s(sent: bytes = sent) -> float:
            with watched(running) as late:
                assert running.raw(sent, 20.0).startswith(b"HTTP/1.1 400")
            # With an error for every entry, made in the loop, the first of these held it for 19 s.
            assert max(late) < 1.5 * slowness(), "the bound leaves room for a machine whose cores are all taken"
            return max(late)

        bound = late_at_most_s * slowness()
        assert best(late_s, bound) < bound
    running.idle()


# ---------------------------------------------------------------------- admission before the body


@pytest.fixture(scope="module")
def full() -> Iterator[Running]:
    """A server in which one answer is in work, and no second is taken."""
    found = Running("llama", max_requests=1, max_body_bytes=2 << 20, max_reading_bytes=4 << 20, header_s=10.0)
    yield found
    found.close()


@contextmanager
def occupied(running: Running) -> Iterator[None]:
    """While one answer is in work."""
    admission, loop = running.admission, running.server._loop
    assert loop is not None
    right = admission.admitted()
    loop.call_soon_threadsafe(right.__enter__)
    while not admission.busy:
        time.sleep(0.01)
    yield
    loop.call_soon_threadsafe(right.__exit__, None, None, None)
    running.idle()


@pytest.mark.case(65)
def test_a_full_server_answers_before_the_body_came(full: Running) -> None:
    size = 1 << 20
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    spent: list[float] = []
    with occupied(full):
        for _ in range(5):
            with full.connect() as link:
                begin = time.monotonic()
                link.sendall(head.encode())
                first = link.recv(1 << 16)
                spent.append(time.monotonic() - begin)
                assert first.startswith(b"HTTP/1.1 503")
                assert b"\r\nretry-after: 1\r\n" in first.lower()
                # It may go on sending, and has its answer nevertheless.
                link.sendall(b" " * size)
                assert (first + received(link)).endswith(b"}}")
    assert statistics.median(spent) < 0.05 * slowness(), spent


@pytest.mark.case(39)
def test_a_wrong_key_is_told_before_the_body_came(locked: Running) -> None:
    for path in (CHAT, "/none"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
        with locked.connect() as link:
            link.sendall(head.encode())
            first = link.recv(1 << 16)
            assert first.startswith(b"HTTP/1.1 401"), first
            link.sendall(b" " * 4_000_000)
            assert (first + received(link)).endswith(b"}}")


@pytest.mark.case(65)
def test_bodies_that_are_read_hold_so_much_and_no_more(full: Running) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {2 << 20}\r\n\r\n"
    links: list[socket.socket] = []
    try:
        for _ in range(4):
            links.append(full.connect())
            links[-1].sendall(head.encode() + b" " * ((2 << 20) - 1))
        deadline = time.monotonic() + 5
        while full.admission.held_bytes < 1 << 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert full.admission.held_bytes <= 4 << 20
        # Small ones are read nevertheless; the large ones that were too many are told.
        assert full.post("/tokenize", {"prompt": "x"}).status_code == 200
        answers = [received(link) for link in links]
        statuses = sorted(answer.split(b" ", 2)[1] for answer in answers)
        assert statuses.count(b"503") >= 1
        assert set(statuses) == {b"503", b"408"}
    finally:
        for link in links:
            link.close()
    full.idle()
    assert full.admission.held_bytes == 0


def test_what_a_body_holds_is_given_back_whatever_becomes_of_it() -> None:
    admission = AdmissionControl(ServerOptions(max_body_bytes=1 << 20, max_reading_bytes=1 << 20))
    with admission.hold() as first:
        first.grow(limits.FREE_BYTES)
        assert admission.held_bytes == 0
        first.grow(100)
        assert admission.held_bytes == 100
        with pytest.raises(HttpError) as caught, admission.hold() as second:
            second.grow(2 << 20)
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "1")
        assert admission.held_bytes == 100
    assert admission.held_bytes == 0


@pytest.mark.case(65)
@pytest.mark.parametrize("stream", [False, True])
def test_bodies_count_until_their_requests_are_prepared_and_are_dropped_then(
    monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    noise = data_url(560, 560)
    body = {"messages": talk("Go on.", noise), "max_tokens": 1400, "ignore_eos": True, "stream": stream}
    size = len(noise)
    running = Running(max_body_bytes=1 << 20, max_reading_bytes=1 << 20)
    sent: list[weakref.ref[Message]] = []
    may_go_on = threading.Event()
    make, message_of = running.llm._inputs.make_items, chat_messages.message_of

    def slow(read: Any) -> Any:
        may_go_on.wait(20)
        return make(read)

    def seen(message: Message, *rest: Any) -> dict[str, Any]:
        sent.append(weakref.ref(message))
        return message_of(message, *rest)

    monkeypatch.setattr(running.llm._inputs, "make_items", slow)
    monkeypatch.setattr(chat_messages, "message_of", seen)

    def until(holds: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 10
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.01)
        return holds()

    try:
        with running.connect() as link:
            link.sendall(request_bytes(CHAT, body))
            assert until(lambda: len(sent) == 1)
            assert running.admission.held_bytes > size - limits.FREE_BYTES
            refused = running.post(CHAT, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
            may_go_on.set()
            # The answer is under way, and nothing of what was sent is left.
            assert until(lambda: running.llm.num_live == 1)
            assert until(lambda: running.admission.held_bytes == 0)
            assert sent[0]() is None
            assert running.llm.num_live == 1
        running.idle()
    finally:
        may_go_on.set()
        running.close()


@pytest.mark.case(64)
def test_beyond_the_bound_of_connections_health_is_told_and_others_may_come_back(full: Running) -> None:
    links = [full.connect() for _ in range(full.options.max_connections + 1)]
    try:
        answer = full.get("/version")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "busy"
        assert full.get("/health").json() == {"status": "ok"}
    finally:
        for link in links:
            link.close()
    full.idle()


# ---------------------------------------------------------------------- names


def test_77_every_answer_has_a_name_and_a_line(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    def told(raw: bytes) -> tuple[str, int, str]:
        """(name, status, body) of an answer, and that the log has exactly one line of it."""
        caplog.clear()
        head, _, body = locked.raw(raw, 1.5).decode().partition("\r\n\r\n")
        name = next(line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("x-request-id"))
        status = int(head.split(" ")[1])
        lines = [r.getMessage() for r in caplog.records if name in r.getMessage()]
        assert len(lines) == 1
        assert f" {status} " in lines[0]
        return name, status, body

    key = "Authorization: Bearer key-one"
    with caplog.at_level(logging.INFO, logger="beheld.server.access_log"):
        name, status, body = told(request_bytes(COMPLETE, {"prompt": "x", "max_tokens": 1}, key))
        assert status == 200
        assert json.loads(body)["id"].rsplit("-", 1)[1] == name.rsplit("-", 1)[1]
        for raw, expected in (
            (request_bytes(COMPLETE, {"prompt": "x"}), 401),
            (request_bytes("/none", {}, key), 404),
            (request_bytes("/version", {}, key), 405),
            (b"GARBAGE\r\n\r\n", 400),
            (b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 40_000 + b"\r\n\r\n", 431),
            (b"GET /version HTTP/1.1\r\nHost: x\r\n", 408),
        ):
            _, status, body = told(raw)
            assert status == expected
            assert json.loads(body)["error"]["message"]
    text = locked.get("/metrics", headers={"Authorization": "Bearer key-one"}).text
    for status in (400, 401, 404, 405, 408, 431):
        assert f'beheld_requests_total{{route="none",status="{status}"}}' in text


def test_a_stream_that_fails_is_counted_as_what_it_became(running: Running) -> None:
    def count() -> float:
        lines = dict(line.rsplit(" ", 1) for line in running.get("/metrics").text.splitlines() if line[:1] != "#")
        return float(lines.get('beheld_requests_total{route="chat",status="499"}', 0))

    before = count()
    body = {"messages": talk("Go on."), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with running.connect() as link:
        link.sendall(request_bytes(CHAT, body))
        link.recv(100)
    deadline = time.monotonic() + 5
    while count() == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert count() == before + 1


@pytest.mark.case(110)
def test_bodies_fit_what_a_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container of 2 GiB, bodies of the whole gibibyte that is the default had the server killed."""
    monkeypatch.setattr(host, "group_memory", lambda: None)
    plain = ServerOptions()
    assert fit_bodies(plain) == plain
    monkeypatch.setattr(host, "group_memory", lambda: (1536 << 20, 2048 << 20))
    assert fit_bodies(plain).max_reading_bytes == 192 << 20
    given = ServerOptions(max_reading_bytes=512 << 20)
    assert fit_bodies(given) == given
    monkeypatch.setattr(host, "group_memory", lambda: (1 << 20, 2048 << 20))
    assert fit_bodies(plain).max_reading_bytes == plain.max_body_bytes
    monkeypatch.setattr(host, "group_memory", lambda: (64 << 30, 128 << 30))
    assert fit_bodies(plain) == plain
