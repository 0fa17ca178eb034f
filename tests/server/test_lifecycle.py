"""A server as a process: its start, its signals, its end (cases by their number)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from beheld.core.errors import BeheldError
from beheld.server.listen import listen
from beheld.server.options import ServerOptions
from tests import tiny
from tests.long import LONG, sized
from tests.server.running import listens, received, request_bytes
from tests.server.slowness import slowness


@contextmanager
def served(
    *flags: str, port: int | None = None, mark: str = "", log: IO[bytes] | int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`beheld serve` on a tiny checkpoint, ready: (process, port)."""
    with begun(*flags, port=port, mark=mark, log=log) as (process, number):
        until(lambda: process.poll() is not None or healthy(number), 90)
        yield process, number


@contextmanager
def begun(
    *flags: str, port: int | None = None, mark: str = "", log: IO[bytes] | int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The same as soon as it was begun. `mark` stands in its environment and in that of its children."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    command = [sys.executable, "-m", "beheld.cli.main", "serve", str(tiny.checkpoint("llama")), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--num-gpu-blocks-override", "300", *flags],
        stderr=log,
        env={**os.environ, "MARK_OF_TEST": mark},
    )
    try:
        yield process, port
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def healthy(port: int) -> bool:
    """True if a server answers there."""
    try:
        # Certificates, which nobody needs here, take longer to read than the answer.
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False, verify=False)
        return answer.status_code == 200
    except httpx.TransportError:
        return False


def until(true: Callable[[], bool], within_s: float) -> None:
    """Wait until it is so, or fail."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """The processes with this mark that live."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                own = f"MARK_OF_TEST={mark}\0".encode() in file.read()
        except OSError:
            continue
        found += [int(name)] if own else []
    return found


LONG_ANSWER: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def test_69_sigterm_drains_and_exits_with_0() -> None:
    with served("--max-model-len", "1024") as (process, port):
        url = f"http://127.0.0.1:{port}"
        link = socket.create_connection(("127.0.0.1", port), timeout=20)
        link.sendall(request_bytes("/v1/completions", LONG_ANSWER | {"stream": True, "n": 4}))
        head = link.recv(100)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.15)
        late = []
        try:
            late = [
                httpx.get(f"{url}/health", trust_env=False),
                httpx.post(f"{url}/v1/completions", json=LONG_ANSWER, trust_env=False),
            ]
        except httpx.TransportError:
            assert process.wait(5) == 0, "it may have ended already"
        rest = head + received(link)
        link.close()
        assert b"data: [DONE]" in rest
        assert b'"error"' not in rest
        for answer in late:
            assert answer.status_code == 503
        assert process.wait(7) == 0


def test_69_sigterm_while_it_loads_ends_all_of_it_with_0() -> None:
    mark = f"sigterm-{os.getpid()}"
    with begun("--engine", "process", mark=mark) as (process, port):
        until(lambda: len(marked(mark)) > 1 and listens(port), 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        until(lambda: not marked(mark), 5)


@pytest.mark.parametrize(
    "signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]], ids=["time is up", "second signal"]
)
def test_69_answers_that_are_cut_off_say_so(signals: list[signal.Signals], tmp_path: Path) -> None:
    """Both an answer in a stream and answers that have not begun. No error is logged, and the engine ends by itself.

    A second signal ends all answers at once.
    """
    log, flags = tmp_path / "log", ("--max-model-len", "2048", "--num-gpu-blocks-override", "2200")
    drain_s = "0.5" if len(signals) == 1 else "60"
    with (
        log.open("wb") as to,
        served(*flags, "--engine", "process", "--drain-timeout", drain_s, log=to) as (process, port),
    ):
        links = []
        for stream in (True, False, False):
            links.append(socket.create_connection(("127.0.0.1", port), timeout=20))
            body = LONG_ANSWER | {"max_tokens": 2000, "n": 16, "stream": stream}
            links[-1].sendall(request_bytes("/v1/completions", body))
        links.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        links[-1].sendall(request_bytes("/v1/completions", LONG_ANSWER)[:-5])
        head = links[0].recv(100)
        process.send_signal(signals[0])
        if len(signals) == 2:
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signals[1])
        begin = time.monotonic()
        streamed, *others = [received(link) for link in links]
        for link in links:
            link.close()
        assert process.wait(10) == 0
        if len(signals) == 2:
            assert time.monotonic() - begin < 3.0 * slowness()
    last = (head + streamed).split(b"data: ")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b'"code":"draining"' in last[-2]
    assert last[-1].startswith(b"[DONE]")
    for answer in others:
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable"), answer[:200]
        assert b'"code":"draining"' in answer
        assert b"retry-after: 30" in answer.lower()
    told = log.read_text()
    assert "Traceback" not in told
    assert "did not end in time" not in told
    assert len([line for line in told.splitlines() if " complete 503 " in line]) == 4, told


def test_68_whenever_the_server_is_killed_all_ends_and_it_can_be_started_again() -> None:
    """While it streams; in the long form also at four points of its start."""
    flags = ("--max-model-len", "1024", "--engine", "process")
    points: dict[str, Callable[[int, int], bool]] = {
        "at once": lambda pid, port: True,
        "the engine is begun": lambda pid, port: bool(_children(pid)),
        "listening": lambda pid, port: listens(port),
        "ready": lambda pid, port: healthy(port),
    }
    mark = uuid.uuid4().hex
    for name, reached in points.items() if LONG else ():
        with begun(*flags, mark=mark) as (process, port):
            until(partial(reached, process.pid, port), 90)
            process.kill()
            process.wait(5)
            until(lambda: not marked(mark), 5)
            with begun(*flags, port=port, mark=mark) as (again, _):
                until(partial(healthy, port), 90)
                assert again.poll() is None, name
    with served(*flags, mark=mark) as (process, port):
        link = socket.create_connection(("127.0.0.1", port), timeout=20)
        link.sendall(request_bytes("/v1/completions", LONG_ANSWER | {"stream": True}))
        assert link.recv(100)
        assert len(marked(mark)) == 2
        process.kill()
        process.wait(5)
        until(lambda: not marked(mark), 5)
        link.close()
        with begun(*flags, port=port, mark=mark) as (again, _):
            until(partial(listens, port), 60)
            assert again.poll() is None


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="long form")
def test_70_fifty_starts_and_stops_on_one_port() -> None:
    """Each answers, ends with 0, and leaves no process; every tenth with an engine in a process."""
    port, mark = None, uuid.uuid4().hex
    for number in range(sized(2, 50)):
        flags = ("--engine", "process" if number % 10 == 1 else "thread")
        with served("--max-model-len", "512", *flags, port=port, mark=mark) as (process, port):
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/completions", json=LONG_ANSWER | {"max_tokens": 3}, trust_env=False
            )
            assert answer.status_code == 200, answer.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0, number
            until(lambda: not marked(mark), 5)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_70_a_port_can_be_taken_again_while_old_connections_linger(host: str) -> None:
    first = listen(ServerOptions(host=host, port=0))
    port = first.getsockname()[1]
    with socket.create_connection((host, port), timeout=5) as client:
        # The side that closes first is the one whose connection lingers.
        first.accept()[0].close()
        assert client.recv(1) == b""
    first.close()
    again = listen(ServerOptions(host=host, port=port))
    with pytest.raises(BeheldError, match=str(port)):
        listen(ServerOptions(host=host, port=port))
    again.close()


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_70_a_port_that_is_taken_is_said_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "beheld.cli.main", "serve", "--port", port]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert port in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--port", "99999"], "port"),
        (["--max-body-mib", "0"], "max-body"),
        (["--config", "/nonexistent.yaml"], "nonexistent"),
        (["a", "--model", "b"], "--model"),
    ],
)
def test_wrong_options_are_named(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from beheld.cli.main import main

    assert main(["serve", *flags]) == 1
    assert word in capsys.readouterr().err


def test_options_come_from_a_file(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from beheld.cli.main import main

    file = tmp_path / "options.yaml"
    file.write_text("port: 70000\nmax-model-len: 64\n")
    assert main(["serve", "--config", str(file)]) == 1
    assert "70000" in capsys.readouterr().err
    file.write_text("max-modle-len: 64\n")
    assert main(["serve", "--config", str(file)]) == 1
    assert "max_model_len" in capsys.readouterr().err


def test_serving_loads_nothing_of_the_engine_for_help() -> None:
    code = (
        "import sys\nfrom beheld.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'uvicorn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
