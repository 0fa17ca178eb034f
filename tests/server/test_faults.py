"""Faults around a server: its log, its sockets, its descriptors, a blocked loop, floods (cases by their number)."""

from __future__ import annotations

import ast
import errno
import itertools
import json
import logging
import math
import os
import random
import re
import resource
import socket
import struct
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from beheld.core.errors import DecodeError, EngineError, ModelError
from beheld.inputs.media import header, workers
from beheld.inputs.media import processor as processing
from beheld.server import arriving_body
from beheld.server.errors import http_error
from beheld.server.http_protocol import BoundedConnection
from beheld.server.keys import KeyGuard
from tests.long import sized
from tests.server.running import ENGINE, Running, data_url, received, request_bytes, talk

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _undisturbed(running: Running) -> Iterator[None]:
    """After every case the server is as before."""
    yield
    running.idle()


# ---------------------------------------------------------------------- the key


KEY = b"k" * 32
WRONG = {"far": b"x" * 32, "near": b"k" * 31 + b"x", "half": b"k" * 16 + b"x" * 16}


def least_p(known: Callable[[bytes], object], seed: int) -> float:
    """Keys that share nothing, half and all but the end with the true one, in any order: how likely times that differ
    so much are if `known` takes as long for all; the least of the three pairs."""
    order = list(WRONG) * sized(4_000, 20_000)
    random.Random(seed).shuffle(order)
    # Each an object of its own, and each time in a place of its own, as in life: where one object happens to lie in
    # memory is worth ten nanoseconds.
    keys = [bytes(bytearray(WRONG[name])) for name in order]
    took = array("q", bytes(8 * len(keys)))
    for place, given in enumerate(keys):
        begin = time.perf_counter_ns()
        known(given)
        took[place] = time.perf_counter_ns() - begin
    samples = {name: [t for t, n in zip(took, order, strict=True) if n == name] for name in WRONG}
    return min(same_distribution_p(samples[a], samples[b]) for a, b in itertools.combinations(WRONG, 2))


def test_40_a_wrong_key_takes_as_long_however_near_it_is() -> None:
    guard = KeyGuard(None, (KEY.decode(), "another"))  # type: ignore[arg-type]
    assert guard._known(KEY)
    assert not any(map(guard._known, WRONG.values()))
    # Of three pairs each; chance alone fails one round in a hundred, and three rounds in a million.
    assert any(least_p(guard._known, seed) > 0.01 / 3 for seed in range(3))


def test_40_a_comparison_that_stops_early_would_be_seen() -> None:
    assert least_p(lambda given: all(a == b for a, b in zip(given, KEY, strict=True)), 0) < 1e-6


def test_40_the_rank_sum_test_knows_equal_from_different() -> None:
    chance = random.Random(2)
    one, other = ([chance.randrange(50) for _ in range(500)] for _ in range(2))
    assert same_distribution_p(one, other) > 0.01
    assert same_distribution_p(one, one[::-1]) == pytest.approx(1.0)
    assert same_distribution_p(one, [value + 10 for value in other]) < 1e-6
    # Counted by hand: ranks 1 2 4 against 3 5 6, U = 1 of a mean of 4.5 and a variance of 5.25.
    assert same_distribution_p([1, 2, 4], [3, 5, 6]) == pytest.approx(math.erfc(3.5 / math.sqrt(5.25) / math.sqrt(2)))


def same_distribution_p(one: list[int], other: list[int]) -> float:
    """Mann and Whitney's rank-sum test, two-sided, by its normal approximation with ties: how likely samples that
    differ at least so much are if both come from one distribution."""
    counts = Counter([*one, *other])
    ranks: dict[int, float] = {}
    below = 0
    for value in sorted(counts):
        ranks[value] = below + (counts[value] + 1) / 2
        below += counts[value]
    m, n, total = len(one), len(other), len(one) + len(other)
    above = sum(ranks[value] for value in one) - m * (m + 1) / 2 - m * n / 2
    ties = sum(count**3 - count for count in counts.values()) / (total * (total - 1))
    return math.erfc(abs(above) / math.sqrt(m * n / 12 * (total + 1 - ties)) / math.sqrt(2))


# ---------------------------------------------------------------------- connections


def test_62_a_half_closed_client_gets_its_answer(running: Running) -> None:
    """`nc -N` and others close their side when the request is sent. Interim responses before the answer are skipped."""
    body = {"messages": talk("Go on."), "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    told = running.post(CHAT, body).json()["choices"][0]["message"]["content"]
    for stream in (False, True):
        with running.connect(20.0) as link:
            link.sendall(request_bytes(CHAT, body | {"stream": stream}))
            link.shutdown(socket.SHUT_WR)
            answer = received(link)
        heads = re.findall(rb"HTTP/1.1 (\d+) ", answer)
        assert set(heads[:-1]) <= {b"102"}
        assert heads[-1] == b"200"
        if stream:
            assert b"data: [DONE]" in answer
        else:
            assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == told


def test_62_half_of_a_request_is_none(running: Running) -> None:
    data = request_bytes(CHAT, {"messages": talk("x"), "max_tokens": 2})
    for size in (0, 30, len(data) - 3):
        with running.connect(5.0) as link:
            link.sendall(data[:size])
            link.shutdown(socket.SHUT_WR)
            begin = time.monotonic()
            assert b"200 OK" not in received(link)
            assert time.monotonic() - begin < 2.0


def test_62_reset_in_the_middle_of_a_stream(running: Running) -> None:
    body = {"messages": talk("Go on."), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    for _ in range(5):
        link = running.connect()
        link.sendall(request_bytes(CHAT, body))
        assert link.recv(200).startswith(b"HTTP/1.1 200")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
    running.idle(2.0)


def test_64_idle_and_short_connections_in_numbers(running: Running) -> None:
    """Idle connections (1,000 in the long form) cost a descriptor each for a time, short ones (2,000) none. Requests
    are answered beside them."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    asked = b"GET /version HTTP/1.1\r\nHost: x\r\n"
    idle, short = min(sized(300, 1_000), soft // 4), sized(300, 2_000)
    before = len(os.listdir("/proc/self/fd"))
    links: list[socket.socket] = []
    try:
        for _ in range(idle):
            links.append(running.connect())
            if len(links) % 2:
                links[-1].sendall(asked + b"\r\n")
                assert links[-1].recv(1000).startswith(b"HTTP/1.1 200")
        begin = time.monotonic()
        assert running.post(COMPLETE, {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert time.monotonic() - begin < 3.0
    finally:
        for link in links:
            link.close()
    for _ in range(short):
        with running.connect() as link:
            link.sendall(asked + b"Connection: close\r\n\r\n")
            assert received(link).startswith(b"HTTP/1.1 200")
    given_back(before)


def given_back(before: int) -> None:
    """Soon there are as many descriptors as there were, but for what a library may have opened once."""
    deadline = time.monotonic() + 5.0
    while (now := len(os.listdir("/proc/self/fd"))) > before + 2:
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.05)


def test_64_beyond_the_bound_connections_are_told_so() -> None:
    """Every one of them in words, also of many at once; when the others go, all is as before."""
    small = Running("llama", max_requests=1)
    links: list[socket.socket] = []
    before = len(os.listdir("/proc/self/fd"))
    try:
        links = [small.connect() for _ in range(small.options.max_connections)]
        beyond = [small.connect() for _ in range(sized(100, 1_000))]
        links += beyond
        for link in beyond:
            link.sendall(request_bytes(COMPLETE, {"prompt": "x", "max_tokens": 1}))
        answers = [received(link) for link in beyond]
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 503"}
        assert all(b"\r\nretry-after: 1\r\n" in answer.lower() for answer in answers)
        for link in links:
            link.close()
        links = []
        small.idle()
        given_back(before)
    finally:
        for link in links:
            link.close()
        small.close()


# ---------------------------------------------------------------------- clock and loop


# Files that show the time to clients -> how often they ask for it.
SHOWN = {"app": 2, "sagemaker_sessions": 1, "vllm_metrics": 1}


def test_75_no_timeout_looks_at_the_clock_on_the_wall() -> None:
    """`time.time` and `datetime` only stand in what is shown, such as the time an answer was made."""
    shown = {f"beheld/server/{name}.py": most for name, most in SHOWN.items()}
    for folder in ("server", "api", "engine", "inputs"):
        for path in (ROOT / "beheld" / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
            found = sum(call in ("time.time", "datetime.now", "datetime.datetime.now") for call in calls)
            assert found <= shown.get(str(path.relative_to(ROOT)), 0), path


def test_76_a_blocked_loop_shows(running: Running) -> None:
    def late() -> float:
        """How often the loop was later than half a second."""
        text = running.get("/metrics").text
        buckets = {
            bound: float(count)
            for bound, count in re.findall(r'beheld_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
        }
        return buckets["+Inf"] - buckets["0.5"]

    before = late()
    loop = running.server._loop
    assert loop is not None
    loop.call_soon_threadsafe(time.sleep, 0.8)
    time.sleep(1.2)
    assert late() >= before + 1


# ---------------------------------------------------------------------- the log


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.lines.append(self.format(record))


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What our loggers and those of our libraries say."""
    handler = Kept()
    names = ("beheld", "uvicorn", "uvicorn.error", "asyncio", "httpx", "httpcore")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


SECRET = "s3cretword"


def test_77_the_log_holds_one_line_per_request_and_nothing_of_its_content(running: Running, kept: Kept) -> None:
    key = {"Authorization": f"Bearer {SECRET}-key", "X-Request-Id": f"{SECRET}-name"}
    requests: list[tuple[str, dict[str, Any]]] = [
        (COMPLETE, {"prompt": f"{SECRET}\r\nERROR forged \x1b[31m", "max_tokens": 1}),
        (COMPLETE, {"prompt": SECRET * 200_000, "max_tokens": 1}),
        (COMPLETE, {"prompt": "x", "model": f"{SECRET}\nforged"}),
        (COMPLETE, {"prompt": "x", f"{SECRET}\nforged": 1}),
        (COMPLETE, {"prompt": "x", "user": SECRET, "stop": [SECRET], "max_tokens": 1}),
        (CHAT, {"messages": talk(SECRET, f"http://127.0.0.1:9/{SECRET}?signature={SECRET}"), "max_tokens": 1}),
        (CHAT, {"messages": talk(SECRET, f"/{SECRET}/picture.png"), "max_tokens": 1}),
        (CHAT, {"messages": talk(SECRET, data_url(seed=5)), "max_tokens": 1}),
        (CHAT, {"messages": talk(SECRET, f"data:image/png;base64,{SECRET}"), "max_tokens": 1}),
        (CHAT, {"messages": [{"role": SECRET, "content": "x"}], "max_tokens": 1}),
        (CHAT, {"messages": talk("x"), "chat_template_kwargs": {SECRET: SECRET}, "max_tokens": 1}),
        (CHAT, {"messages": talk("x"), "structured_outputs": {"regex": f"({SECRET}"}, "max_tokens": 1}),
    ]
    for path, body in requests:
        answer = running.request(
            "POST",
            path,
            json=body,
            headers=key,
            timeout=30,
        )
        assert answer.status_code < 500, answer.text
    # By hand, since the client refuses to send what is no header.
    for value in ("\x1b[31m", "a\x07b", "a\tb", "a\x7fb", "a\x00b", "a\rb", "a\nERROR forged", "a\xe9\x9b1mb"):
        for name in ("X-Request-Id", "User-Agent", "Authorization", "Referer", "X-Forwarded-For"):
            sent = request_bytes(COMPLETE, {"prompt": "x", "max_tokens": 1}, f"{name}: {SECRET}{value}")
            (answer,) = re.findall(rb"\AHTTP/1.1 (\d+) ", running.raw(sent))
            assert answer in (b"200", b"400"), (name, value)
            requests += [(COMPLETE, {})] * (answer == b"200")
    running.raw(f"GET /{SECRET}\x01 HTTP/1.1\r\nHost: {SECRET}\r\n\r\n".encode())
    running.get(f"/{SECRET}")
    ours = [line for line in kept.lines if re.match(r"req-\w+ (chat|complete) \d", line)]
    assert len(ours) == len(requests), ours
    for line in kept.lines:
        assert SECRET not in line
        assert len(line) < 1000
        assert line.isprintable(), line


def test_77_what_goes_wrong_inside_shows_nothing_of_it_outside(
    running: Running, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError(f"/etc/{SECRET}")

    monkeypatch.setattr(running.llm, "token_ids", broken)
    answer = running.post("/tokenize", {"prompt": "x"})
    assert answer.status_code == 500
    assert SECRET not in answer.text
    assert "Traceback" not in answer.text
    # The operator is told what it was.
    assert any(SECRET in line for line in kept.lines)


def planted(*_: object, **__: object) -> None:
    raise RuntimeError(f"/etc/{SECRET}")


def asking(url: str) -> dict[str, Any]:
    return {"messages": talk("x", url), "max_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["decode", "processor", "template", "tokenizer", "header"])
@pytest.mark.case(77)
def test_unexpected_errors_are_ours_and_told_under_a_name(
    inside: Running, kept: Kept, monkeypatch: pytest.MonkeyPatch, where: str, stream: bool
) -> None:
    """Wherever something goes wrong that nobody foresaw, the client learns the name of its request and no more."""
    inputs = inside.llm._inputs
    processor = inputs._processor
    monkeypatch.setattr(
        *{
            "decode": (workers, "open_source"),
            # Not of the kinds that a processor answers strange content with.
            "processor": (processor, "_call"),
            "template": (type(inputs.tokenizer), "apply_chat_template"),
            "tokenizer": (inputs._tokenizer, "encode"),
            "header": (header, "size_of"),
        }[where],
        planted if where != "processor" else mistaken,
    )
    answer = inside.post(CHAT, asking(data_url(seed=next(_UNSEEN))) | {"stream": stream})
    assert answer.status_code == 500, answer.text
    assert SECRET not in answer.text
    assert "Traceback" not in answer.text
    error = answer.json()["error"]
    assert error["code"] == "internal"
    name = answer.headers["x-request-id"]
    assert name in error["message"]
    told = [line for line in kept.lines if SECRET in line]
    assert len(told) == 1, told
    assert told[0].startswith(f"{name} failed")


def mistaken(*_: object, **__: object) -> None:
    raise AttributeError(f"/etc/{SECRET}")


@pytest.mark.parametrize(
    ("module", "name"),
    [(Image, "open"), (processing.ItemProcessor, "_call")],
    ids=["a picture's bytes", "a processor's refusal"],
)
@pytest.mark.case(77)
def test_of_what_libraries_say_of_content_nothing_is_told(
    inside: Running, kept: Kept, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    url = data_url(seed=next(_UNSEEN))
    monkeypatch.setattr(module, name, planted)
    answer = inside.post(CHAT, asking(url))
    assert answer.status_code == 400, answer.text
    assert SECRET not in answer.text
    assert answer.json()["error"]["message"].startswith("image 1: ")


@pytest.mark.case(31, 77)
def test_what_a_worker_says_of_itself_is_for_the_log(
    running: Running, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise EngineError(f"RuntimeError: /etc/{SECRET}")

    monkeypatch.setattr(running.llm._inputs.workers, "decode", failing)
    answer = running.post(CHAT, asking(data_url(seed=next(_UNSEEN))))
    assert answer.status_code == 500
    assert SECRET not in answer.text
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert len([line for line in kept.lines if SECRET in line]) == 1


@pytest.mark.case(77)
def test_what_the_operator_has_to_mend_is_no_fault_of_clients() -> None:
    found = http_error(ModelError("The processor cannot be loaded.", detail=f"/etc/{SECRET}"))
    assert found.status == 500
    assert SECRET not in json.dumps(found.body())
    named = http_error(DecodeError("The image is broken.", "Send it again.", item="image 1", detail=SECRET))
    assert named.status == 400
    assert named.body()["error"]["message"] == "image 1: The image is broken. Send it again."
    assert SECRET in str(DecodeError("The image is broken.", detail=SECRET))


_UNSEEN = itertools.count(7700)


@pytest.fixture(scope="module")
def inside() -> Iterator[Running]:
    """A server that opens media in its own process, where faults can be planted."""
    found = Running(engine=ENGINE | {"media_workers": 0})
    assert found.post(CHAT, asking(data_url(seed=1))).status_code == 200
    yield found
    found.idle()
    found.close()


# ---------------------------------------------------------------------- memory


def test_111_a_body_for_which_there_is_no_memory_is_told_in_json(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses the pages, as it does under a limit on the address space."""
    monkeypatch.setattr(arriving_body, "_pages", lambda size: mmap(-1, size << 24))
    answer = running.post(CHAT, {"messages": talk("x" * (4 << 20)), "max_tokens": 1})
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "no_memory"
    assert running.post(CHAT, {"messages": talk("x"), "max_tokens": 1}).status_code == 200


def test_111_received_data_for_which_there_is_no_memory_is_told_in_json(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = BoundedConnection.receive_data

    def tight(connection: BoundedConnection, data: bytes) -> None:
        if b"tight" in data:
            raise MemoryError
        receive(connection, data)

    monkeypatch.setattr(BoundedConnection, "receive_data", tight)
    answer = running.post(CHAT, {"messages": talk("x"), "max_tokens": 1}, headers={"x-kind": "tight"})
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
    assert answer.json()["error"]["code"] == "no_memory"
    assert running.post(CHAT, {"messages": talk("x"), "max_tokens": 1}).status_code == 200


def test_111_what_the_server_itself_cannot_allocate_is_told_so(running: Running) -> None:
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ):
        assert http_error(error).status == 503
    assert http_error(OSError(errno.EIO, "Input/output error")).status == 500
