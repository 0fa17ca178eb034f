"""A server as a process: its start, its signals, its end (cases by their number)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.server.running import received, request_bytes


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`beheld serve` on a tiny checkpoint: (process, port)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "beheld.cli.main", "serve", str(tiny.checkpoint("llama")), "--port", str(port)]
    process = subprocess.Popen([*command, "--num-gpu-blocks-override", "300", *flags], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield process, port
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def test_69_sigterm_drains_and_exits_with_0() -> None:
    with served("--max-model-len", "1024") as (process, port):
        url = f"http://127.0.0.1:{port}"
        link = socket.create_connection(("127.0.0.1", port), timeout=20)
        link.sendall(request_bytes("/v1/completions", LONG | {"stream": True, "n": 4}))
        head = link.recv(100)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.15)
        late = []
        try:
            late = [
                httpx.get(f"{url}/health", trust_env=False),
                httpx.post(f"{url}/v1/completions", json=LONG, trust_env=False),
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


def test_69_a_second_signal_ends_at_once() -> None:
    with served("--max-model-len", "2048", "--drain-timeout", "60", "--engine", "process") as (process, port):
        threads = []
        for _ in range(8):
            body = LONG | {"max_tokens": 2000, "n": 8}
            threads.append(threading.Thread(target=_ask, args=(port, body)))
            threads[-1].start()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(10)
        assert time.monotonic() - begin < 3.0
        for thread in threads:
            thread.join()


def _ask(port: int, body: dict[str, Any]) -> None:
    try:
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60, trust_env=False)
    except httpx.TransportError:
        return


def test_66_a_server_whose_engine_was_killed_says_so_and_ends() -> None:
    with served("--max-model-len", "2048", "--engine", "process") as (process, port):
        (engine,) = _children(process.pid)
        link = socket.create_connection(("127.0.0.1", port), timeout=20)
        link.sendall(request_bytes("/v1/completions", LONG | {"max_tokens": 2000, "stream": True}))
        head = link.recv(100)
        begin = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        rest = head + received(link)
        link.close()
        assert time.monotonic() - begin < 2.0
        assert b"engine_dead" in rest
        assert b"data: [DONE]" in rest
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 503
        assert process.wait(10) == 3


def test_68_the_engine_ends_with_the_server() -> None:
    with served("--max-model-len", "1024", "--engine", "process") as (process, port):
        (engine,) = _children(process.pid)
        process.kill()
        process.wait(5)
        deadline = time.monotonic() + 5
        while os.path.exists(f"/proc/{engine}"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert port


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
        (["--max-body-mib", "0"], "max_body"),
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
