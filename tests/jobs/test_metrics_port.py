"""A job's metrics can be read while it runs, and nobody who connects holds them up."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from beheld.cli.main import main
from beheld.core.errors import ConfigError
from beheld.jobs import metrics_port
from beheld.jobs.metrics_port import MetricsPort
from beheld.server.options import ServerOptions
from tests import tiny
from tests.jobs.test_job import MODEL, asked, rows

HOST = b"Host: localhost\r\n"


def ask(port: int, head: bytes) -> bytes:
    """The whole answer to what is sent; empty if the connection is closed without one."""
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 20) as link:
        link.sendall(head)
        return b"".join(iter(lambda: link.recv(65536), b""))
    return b""


def get(port: int, path: str = "/metrics", more: bytes = HOST) -> bytes:
    return ask(port, b"GET %s HTTP/1.1\r\n%s\r\n" % (path.encode(), more))


def tokens(answer: bytes) -> float | None:
    found = re.search(rb"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", answer, re.MULTILINE)
    return None if found is None else float(found[1])


@contextlib.contextmanager
def opened(**options: object) -> Iterator[int]:
    with contextlib.closing(MetricsPort(ServerOptions(port=0, names=("tiny",), **options))) as port:  # type: ignore[arg-type]
        yield port.port


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_metrics_are_there_before_the_model_and_count_while_the_job_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, port = tmp_path / "in.jsonl", tmp_path / "out.jsonl", free_port()
    lines = [asked(str(n), messages=[{"role": "user", "content": f"x{n}"}], max_tokens=8) for n in range(150)]
    source.write_text("\n".join(lines))
    seen: list[float] = []

    def look() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (seen and seen[-1] > 0):
            with contextlib.suppress(OSError):
                found = tokens(get(port))
                if found is not None:
                    seen.append(found)

    watcher = threading.Thread(target=look)
    watcher.start()
    words = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(tiny.checkpoint("qwen2_vl")), *MODEL]
    assert main([*words, "--concurrency", "1", "--enable-metrics", "--url", "127.0.0.1", "--port", str(port)]) == 0
    watcher.join()
    assert seen[0] == 0
    assert 0 < seen[-1] <= 150 * 8
    assert f"metrics at http://127.0.0.1:{port}/metrics" in capsys.readouterr().err
    assert len(rows(target)) == 150
    # The port is free again.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 2)


def test_only_its_routes_are_there() -> None:
    with opened() as port:
        assert get(port, "/").startswith(b"HTTP/1.1 200 OK\r\n")
        assert get(port).split(b"\r\n\r\n", 1)[1].startswith(b"# HELP")
        head = ask(port, b"HEAD /metrics HTTP/1.1\r\n" + HOST + b"\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.endswith(b"\r\n\r\n")
        assert get(port, "/health").startswith(b"HTTP/1.1 404 ")
        assert ask(port, b"POST /metrics HTTP/1.1\r\n" + HOST + b"\r\n").startswith(b"HTTP/1.1 405 ")
        assert ask(port, b"\x16\x03\x01\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        # A page of another site, whose name was given this machine's address.
        assert get(port, more=b"Host: example.org\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_key_is_asked_for() -> None:
    with opened(api_keys=("sesame",)) as port:
        assert get(port).startswith(b"HTTP/1.1 401 ")
        assert get(port, more=HOST + b"Authorization: Bearer sesame\r\n").startswith(b"HTTP/1.1 200 ")


def test_nobody_holds_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "_CONNECTION_S", 1.0)
    with opened() as port, contextlib.ExitStack() as links:
        assert ask(port, b"GET / HTTP/1.1\r\nX: " + b"x" * (20 << 10)).startswith(b"HTTP/1.1 400")
        for _ in range(metrics_port._MAX_CONNECTIONS):
            links.enter_context(socket.create_connection(("127.0.0.1", port), 5)).sendall(b"GET /met")
        time.sleep(0.2)
        assert get(port) == b""
        time.sleep(1.2)
        assert get(port).startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_address_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened() as port:
        with pytest.raises(ConfigError, match="Cannot listen"):
            MetricsPort(ServerOptions(port=port))
        source = tmp_path / "in.jsonl"
        source.write_text(json.dumps({}))
        words = ["run-batch", "-i", str(source), "-o", str(tmp_path / "o"), "--enable-metrics", "--port", str(port)]
        assert main(words) == 1
        assert "--port" in capsys.readouterr().err
        assert main([*words, "--ray"]) == 1
        assert "--enable-metrics" in capsys.readouterr().err
