"""A server with two processes that speak HTTP: which of them a client meets makes no difference."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from beheld.cli import serve
from beheld.cli.front import CODEC
from beheld.cli.fronts import _Front, _terminate
from beheld.cli.main import main
from beheld.engine.process import Spawned
from beheld.wire.link import Link, pair
from tests import tiny
from tests.server.running import Running, data_url, talk
from tests.server.test_process import children

KEYS = ("key-one", "key-two")


class Fronted:
    """The server's process, and connections to the front of one's choice."""

    def __init__(self, log: Path, *flags: str, keys: tuple[str, ...] = ()) -> None:
        command = [sys.executable, "-m", "beheld.cli.main", "serve", str(tiny.checkpoint("qwen2_vl"))]
        command += ["--api-server-count", "2", "--num-gpu-blocks-override", "400", "--max-model-len", "2048"]
        command += ["--dtype", "float32", "--seed", "0", "--max-num-seqs", "16", *flags]
        self.log, self.keys = log, keys
        self.socket: str | None = None
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        deadline = time.monotonic() + 120
        while (found := re.search(r"Serving \S+ at (\S+:(\d+)|the Unix socket (\S+))", log.read_text())) is None:
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        self.port, self.uds = int(found[2] or 0), found[3]

    def processes(self, module: str) -> list[int]:
        """The children that run a module."""
        found = []
        for pid in children(self.process.pid):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found += [pid] if module.encode() in file.read().split(b"\0") else []
        return found

    @property
    def fronts(self) -> list[int]:
        """The process ids of fronts 0 and 1."""
        return [self.process.pid, *self.processes("beheld.cli.front")]

    def connect(self, front: int | None = None) -> http.client.HTTPConnection:
        """A connection that the front of this number has accepted, or any one."""
        # Kept until then: while others have fewer, a front leaves connections to them.
        others: list[http.client.HTTPConnection] = []
        for _ in range(200):
            link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            if self.uds is not None:
                link.sock = socket.socket(socket.AF_UNIX)
                link.sock.connect(self.uds)
                return link
            link.connect()
            if front is None or self.holder(link) == front:
                for other in others:
                    other.close()
                return link
            others.append(link)
        raise AssertionError(f"front {front} accepts no connection")

    def holder(self, link: http.client.HTTPConnection) -> int:
        """The number of the front that has accepted a connection."""
        own = f":{link.sock.getsockname()[1]:04X}"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with open("/proc/net/tcp") as file:
                rows = [line.split() for line in file][1:]
            inodes = {row[9] for row in rows if row[2].endswith(own) and row[1].endswith(f":{self.port:04X}")}
            for number, pid in enumerate(self.fronts):
                # 0 for one that starts.
                for name in os.listdir(f"/proc/{pid}/fd") if pid else ():
                    try:
                        target = os.readlink(f"/proc/{pid}/fd/{name}")
                    except OSError:
                        continue
                    if target.startswith("socket:[") and target[8:-1] in inodes:
                        return number
        raise AssertionError("nobody has accepted the connection")

    def begin(
        self, method: str, path: str, body: Any = None, front: int | None = None, key: str = "", **headers: str
    ) -> http.client.HTTPResponse:
        """Send a request to a front; the answer is not read yet."""
        link = self.connect(front)
        sent = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.keys:
            named["authorization"] = f"Bearer {key or self.keys[0]}"
        link.request(method, path, sent, {"content-type": "application/json", "connection": "close", **named})
        return link.getresponse()

    def ask(self, method: str, path: str, body: Any = None, front: int | None = None, **more: str) -> tuple[int, Any]:
        """A status and what was answered."""
        with self.begin(method, path, body, front, **more) as answer:
            data = answer.read()
        return answer.status, json.loads(data) if data[:1] in b"{[" and data else data.decode()

    def metric(self, name: str, front: int | None = None) -> float:
        """One figure of /metrics, 0 if it is not there."""
        status, text = self.ask("GET", "/metrics", front=front)
        assert status == 200, text
        return float(dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#").get(name, 0))

    def until(self, met: Any, within_s: float = 60.0) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + within_s
        while not met():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


def events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """The events of a stream with their ids; an error where it is broken off."""
    name = ""
    for line in answer:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"id: "):
            name = line[4:].strip().decode()
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            yield name, event
            if event.get("type") in ("response.completed", "response.incomplete"):
                return
    raise ConnectionError("the stream was broken off")


def streamed(answer: http.client.HTTPResponse) -> str:
    """The text of a streamed chat; it ends with "error" if it is broken off."""
    text = ""
    try:
        for _, event in events(answer):
            if "error" in event:
                return text + "error"
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    except (OSError, http.client.HTTPException):
        return text + "error"
    return text


def asked(number: int, max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    """A greedy chat about one of a few images."""
    told = talk(f"what {number}", data_url(84, 56, seed=number % 4))
    return {"messages": told, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    """Two fronts before two engines, with two keys and the operator's routes."""
    flags = ["--port", "0", "-dp", "2", "--operator-routes", "--api-key", *KEYS]
    made = Fronted(tmp_path_factory.mktemp("server") / "log", *flags, keys=KEYS)
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


def test_both_fronts_answer_as_one_process_does(fronted: Fronted, running: Running) -> None:
    chats = [asked(number) for number in range(24)]
    expected = [running.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"] for chat in chats]
    before = fronted.metric('beheld_requests_total{route="chat",status="200"}')

    def answer(number: int) -> str:
        stream = number % 3 == 0
        path, body = "/v1/chat/completions", chats[number] | {"stream": stream}
        if stream:
            return streamed(fronted.begin("POST", path, body, front=number % 2))
        return str(fronted.ask("POST", path, body, front=number % 2)[1]["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(answer, range(24))) == expected
    for front in (0, 1):
        # All figures are sums over the fronts, whichever is asked; those of the engine stand there once. A stream
        # counts a moment after its end, and a front that does not answer within a second is left out.
        deadline = time.monotonic() + 20
        while fronted.metric('beheld_requests_total{route="chat",status="200"}', front) != before + 24:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert fronted.metric('beheld_kv_blocks{engine="1",state="all"}', front) == 400
    # All fronts share one router, so a repeated image goes to its engine from each of them.
    repeated = fronted.metric('beheld_routing{count="num_repeated"}')
    assert repeated >= 19
    assert fronted.metric('beheld_routing{count="num_found"}') >= 0.95 * repeated


def test_connections_spread_over_the_fronts(fronted: Fronted) -> None:
    links = [fronted.connect() for _ in range(60)]
    held = [fronted.holder(link) for link in links]
    for link in links:
        link.close()
    # Where one gets no processor time for a moment, the other takes what came meanwhile. Without counts, one took 57.
    assert min(held.count(0), held.count(1)) >= 8


def test_requests_without_a_seed_differ_between_fronts(fronted: Fronted) -> None:
    """Each front counts its requests, and seeds are made of these numbers."""
    body = {"prompt": "x", "max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    texts = [fronted.ask("POST", "/v1/completions", body, front)[1]["choices"][0]["text"] for front in (0, 1) * 8]
    assert len(set(texts)) == 16


def test_stored_responses_are_known_to_every_front(fronted: Fronted) -> None:
    name, seen = None, []
    for turn in range(4):
        body = {"input": f"and {turn}", "max_output_tokens": 4, "temperature": 0, "previous_response_id": name}
        status, found = fronted.ask("POST", "/v1/responses", body, front=turn % 2)
        assert status == 200, found
        name = found["id"]
        seen.append(found["usage"]["input_tokens"])
    assert seen == sorted(set(seen)), "each turn has the earlier ones"
    path = f"/v1/responses/{name}"
    assert [fronted.ask("GET", path, front=front)[0] for front in (0, 1)] == [200, 200]
    # The other key's client finds none of it.
    assert [fronted.ask("GET", path, front=front, key=KEYS[1])[0] for front in (0, 1)] == [404, 404]
    assert fronted.ask("DELETE", path, front=1)[0] == 200
    assert fronted.ask("GET", path, front=0)[0] == 404
    assert fronted.ask("GET", path, front=1, key="wrong")[0] == 401


def test_a_background_response_is_cancelled_over_the_other_front(fronted: Fronted) -> None:
    body = {"input": "x", "max_output_tokens": 1500, "temperature": 0, "background": True}
    name = fronted.ask("POST", "/v1/responses", body, front=1)[1]["id"]
    status, found = fronted.ask("POST", f"/v1/responses/{name}/cancel", front=1)
    assert (status, found["status"]) == (200, "cancelled")


@pytest.mark.parametrize("front", [0, 1])
def test_a_stream_is_taken_up_again_over_any_front(fronted: Fronted, front: int) -> None:
    whole = streamed(fronted.begin("POST", "/v1/chat/completions", asked(5, 40, stream=True), front))
    begun = fronted.begin("POST", "/v1/chat/completions", asked(5, 40, stream=True), front, x_resumable="true")
    text, last = "", ""
    for event_id, event in events(begun):
        last = event_id
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if len(text) > 3:
            break
    begun.close()
    name = last.split(":")[0]
    assert name.startswith(f"stream-{front}.")
    for other in (0, 1):
        rest = fronted.begin("GET", f"/v1/streams/{name}", front=other, last_event_id=last)
        assert text + streamed(rest) == whole
    assert fronted.ask("GET", f"/v1/streams/{name}", front=0, key=KEYS[1])[0] == 404
    assert fronted.ask("GET", f"/v1/streams/stream-{front}.x", front=1 - front)[0] == 404


def test_the_operator_reaches_the_engine_over_any_front(fronted: Fronted) -> None:
    for front in (0, 1):
        assert fronted.ask("POST", "/sleep?level=1", front=front)[0] == 200
        assert all(fronted.ask("GET", "/is_sleeping", front=each)[1] == {"is_sleeping": True} for each in (0, 1))
        refused = [fronted.ask("POST", "/v1/completions", {"prompt": "x"}, front=each) for each in (0, 1)]
        assert [status for status, _ in refused] == [503, 503]
        assert fronted.ask("POST", "/wake_up", front=front)[0] == 200
        found = [fronted.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}, each) for each in (0, 1)]
        assert [status for status, _ in found] == [200, 200]


def test_an_answer_of_a_client_that_leaves_is_aborted_over_both_fronts(fronted: Fronted) -> None:
    def busy() -> float:
        return sum(fronted.metric(f'beheld_sequences{{engine="{engine}",state="running"}}') for engine in "01")

    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1900, "stream": True}),
    ):
        answer = fronted.begin("POST", path, body, front=1)
        answer.readline()
        fronted.until(lambda: busy() == 1)
        answer.close()
        fronted.until(lambda: busy() == 0, 10)
    fronted.until(lambda: fronted.ask("GET", "/load", front=1)[1] == {"server_load": 0}, 10)


def raw(fronted: Fronted, front: int, data: bytes, within_s: float = 10.0) -> tuple[int, bytes]:
    """The status of the answer to these bytes, and all that came; the connection closes behind it."""
    link = fronted.connect(front)
    assert link.sock is not None
    link.sock.settimeout(within_s)
    link.sock.sendall(data)
    found = b""
    while piece := link.sock.recv(65536):
        found += piece
    link.close()
    return int(found.split(b" ")[1]), found


@pytest.mark.parametrize("front", [0, 1])
def test_a_front_that_passes_on_is_as_strict_as_the_one_that_answers(fronted: Fronted, front: int) -> None:
    head = b"Host: localhost\r\nAuthorization: Bearer key-one\r\nContent-Type: application/json\r\n"
    body = b'{"input": "x", "max_output_tokens": 1}'
    post, short = b"POST /v1/responses HTTP/1.1\r\n" + head, head + b"Connection: close\r\n"
    # Two lengths, of which a proxy in front may take the other.
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
    assert raw(fronted, front, post + both + chunked)[0] == 400
    assert raw(fronted, front, b"POST /v1/responses HTTP/1.1\r\n" + short + both[-30:] + chunked)[0] == 200
    # As many headers as there may be.
    more = b"".join(b"x-%d: 1\r\n" % number for number in range(95))
    many = b"POST /v1/responses HTTP/1.1\r\n" + short + more + b"Content-Length: %d\r\n\r\n" % len(body) + body
    assert raw(fronted, front, many)[0] == 200
    # What is no part of a URL, but of a line that HTTP allows.
    assert raw(fronted, front, b"GET /v1/responses/x#y?z#[ HTTP/1.1\r\n" + short + b"\r\n")[0] == 404
    # Neither "..": a path is what the client has written.
    assert raw(fronted, front, b"GET /v1/responses/../../metrics HTTP/1.1\r\n" + short + b"\r\n")[0] == 404
    ancient = b"POST /v1/responses HTTP/1.0\r\nAuthorization: Bearer key-one\r\nContent-Type: application/json\r\n"
    assert raw(fronted, front, ancient + b"Content-Length: %d\r\n\r\n" % len(body) + body)[0] == 200


@pytest.mark.parametrize("front", [0, 1])
def test_a_refusal_does_not_wait_for_the_body(fronted: Fronted, front: int) -> None:
    for key, length, status in ((b"wrong", 1000, 401), (b"key-one", 1 << 40, 413)):
        head = b"Host: localhost\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n" % key
        sent = b"POST /v1/responses HTTP/1.1\r\n" + head + b"Content-Length: %d\r\n\r\n" % length + b"x" * 100
        found, answer = raw(fronted, front, sent)
        assert found == status
        assert answer.lower().count(b"connection: close") == 1


def test_killed_front_is_started_anew_while_the_other_serves(fronted: Fronted) -> None:
    path, chats = "/v1/chat/completions", [asked(number, 200, stream=True) for number in range(3)]
    expected = [streamed(fronted.begin("POST", path, chat, 1)) for chat in chats]
    count = 'beheld_requests_total{route="chat",status="200"}'
    counted = fronted.metric(count)
    victim = fronted.fronts[1]
    mine = [fronted.begin("POST", path, chat, 0) for chat in chats]
    lost = [fronted.begin("POST", path, chat | {"max_tokens": 1500}, 1) for chat in chats]
    for answer in (*mine, *lost):
        answer.readline()
    os.kill(victim, signal.SIGKILL)
    assert all(streamed(answer).endswith("error") for answer in lost)
    assert [streamed(answer) for answer in mine] == expected
    assert fronted.ask("GET", "/health")[0] == 200

    def ended() -> bool:
        return not any(fronted.metric(f'beheld_sequences{{engine="{engine}",state="running"}}') for engine in "01")

    fronted.until(ended, 10)
    fronted.until(lambda: "Front 1 serves again" in fronted.log.read_text())
    assert fronted.fronts[1] != victim
    assert streamed(fronted.begin("POST", path, chats[0], 1)) == expected[0]
    assert fronted.ask("GET", "/metrics", front=1)[0] == 200
    # What it had counted stays.
    fronted.until(lambda: fronted.metric(count) >= counted + len(mine), 20)


def test_sigterm_drains_all_fronts(fronted: Fronted) -> None:
    running = [fronted.begin("POST", "/v1/chat/completions", asked(n, 200, stream=True), n % 2) for n in range(4)]
    # This one front 1 passes on, so front 0 must wait for it, and front 1 for front 0.
    body = {"input": "x", "max_output_tokens": 300, "temperature": 0, "stream": True}
    passed = fronted.begin("POST", "/v1/responses", body, front=1)
    passed.readline()
    for answer in running:
        answer.readline()
    left = children(fronted.process.pid)
    (folder,) = {
        Path(name) for name in re.findall(r"/\S*/beheld-fronts-[^/\s]+(?=/0)", Path("/proc/net/unix").read_text())
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    fronted.process.send_signal(signal.SIGTERM)
    assert not any(streamed(answer).endswith("error") for answer in running)
    assert any(event.get("type") in ("response.completed", "response.incomplete") for _, event in events(passed))
    assert fronted.process.wait(20) == 0
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
    assert not folder.exists()


def test_a_dead_engine_ends_all_fronts_with_status_3(tmp_path: Path) -> None:
    server = Fronted(tmp_path / "log", "--uds", str(tmp_path / "socket"))
    try:
        (engine,) = server.processes("beheld.engine.process")
        # Over several connections, so that both fronts have some.
        running = [server.begin("POST", "/v1/chat/completions", asked(n, 1500, stream=True)) for n in range(8)]
        for answer in running:
            answer.readline()
        left = children(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert all(streamed(answer).endswith("error") for answer in running)
        assert server.ask("GET", "/health")[0] == 503
        assert server.process.wait(15) == 3
        assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
        assert server.log.read_text().count("then ends with status 3") == 1
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine", "thread"], "needs the engine in a process"),
        (["--enable-lora", "--allow-runtime-lora-updating"], "--allow-runtime-lora-updating is for one process"),
        (["-asc", "0"], "must be at least 1"),
    ],
)
def test_what_does_not_go_with_several_fronts(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-server-count", "2", *flags]) != 0
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "cores", "accelerated", "count"),
    [
        (["-dp", "3"], 12, True, 3),
        (["-dp", "3"], 11, True, 1),
        (["-dp", "3"], 12, False, 1),
        (["-dp", "3", "--enable-lora", "--allow-runtime-lora-updating"], 64, True, 1),
        (["-dp", "3", "--data-parallel-backend", "ray"], 64, True, 1),
        (["-dp", "3", "-asc", "2"], 64, True, 2),
        ([], 64, True, 1),
    ],
)
def test_engines_with_gpus_get_a_front_each(
    flags: list[str], cores: int, accelerated: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(serve, "has_accelerator", lambda device: accelerated)
    monkeypatch.setattr(
        serve, "engine_options", lambda arguments, answers: {k: v for k, v in vars(arguments).items() if v}
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(serve, "_serve", lambda *given: seen.append(1) or 0)
    monkeypatch.setattr(serve, "_serve_all", lambda model, options, server, count, leaving: seen.append(count) or 0)
    assert main(["serve", *flags]) == 0
    assert seen == [count]


def test_a_folder_whose_path_is_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert main(["serve", str(tiny.checkpoint("qwen2_vl")), "--api-server-count", "2", "--port", "0"]) != 0
    assert "Set TMPDIR to one of at most" in capsys.readouterr().err
    assert not list(folder.glob("beheld-fronts-*"))


def test_a_signal_meets_a_front_that_ends_just_now() -> None:
    """Another thread waits for its process, and has not said yet that it has ended: no error in a signal's handler."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    with process._waitpid_lock:  # type: ignore[attr-defined]
        os.waitpid(process.pid, 0)
        ours, theirs = pair()
        with ours, theirs:
            _terminate(_Front(Spawned(process, ours), Link(ours, CODEC)))
    process.wait()


def test_a_signal_during_the_start_leaves_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "beheld.cli.main", "serve", str(tiny.checkpoint("qwen2_vl")), "--port", "0"]
    process = subprocess.Popen([*command, "--api-server-count", "2"], env=os.environ | {"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("beheld-fronts-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    # Both processes load their libraries now.
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not list(tmp_path.glob("beheld-fronts-*"))
