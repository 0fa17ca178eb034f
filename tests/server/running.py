"""A real server on a real port in a thread of the test process, and raw bytes to and from it."""

from __future__ import annotations

import base64
import faulthandler
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from beheld.api.async_llm import AsyncLLM
from beheld.server.listen import listen
from beheld.server.options import ServerOptions
from beheld.server.serve import make
from tests import tiny

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "seed": 0,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 600,
    "max_model_len": 2048,
    "limit_mm_per_prompt": {"image": 4, "video": 1},
    "disable_log_stats": True,
}
SMALL = ServerOptions(
    port=0,
    names=("tiny",),
    max_body_bytes=8 << 20,
    max_answers=8,
    header_s=1.0,
    body_s=1.5,
    send_s=1.5,
    drain_s=5.0,
    show_dashboard=True,
)
# Routes for people, which openapi.json does not name.
PAGES = {"/", "/dashboard", "/docs"}


class Reachable:
    """A server that listens at a port of this machine, and what tests ask it."""

    def __init__(self, port: int, scheme: str = "http", api_keys: tuple[str, ...] = ()) -> None:
        self.port = port
        self.url = f"{scheme}://127.0.0.1:{port}"
        self._key = {"Authorization": f"Bearer {api_keys[0]}"} if api_keys else {}
        # Making a client takes longer than most requests.
        self._client = httpx.Client(
            timeout=60, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def close(self) -> None:
        """Close what this side holds."""
        self._client.close()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST JSON."""
        return self._client.post(self.url + path, json=body, **options)

    def post_text(self, path: str, text: str) -> httpx.Response:
        """POST what says that it is JSON."""
        return self._client.post(self.url + path, content=text, headers={"content-type": "application/json"})

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return self._client.get(self.url + path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request of any method."""
        return self._client.request(method, self.url + path, **options)

    def raw(self, data: bytes, wait_s: float = 5.0) -> bytes:
        """Send bytes, and read until the server closes or stays silent for `wait_s`."""
        with self.connect(wait_s) as link:
            link.sendall(data)
            return received(link)

    def connect(self, wait_s: float = 5.0, source: str = "") -> socket.socket:
        """An open connection, from an address of this machine; each is another client."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=wait_s, source_address=(source, 0))

    def idle(self, within_s: float = 5.0) -> None:
        """Assert that soon nothing runs, everything was given back, and the engine answers."""
        deadline = time.monotonic() + within_s
        while True:
            text = self.get("/metrics", headers=self._key).text
            found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
            free, total = (found[f'beheld_kv_blocks{{engine="0",state="{state}"}}'] for state in ("free", "all"))
            busy = [found[f'beheld_sequences{{engine="0",state="{state}"}}'] for state in ("running", "waiting")]
            busy.append(found["beheld_answers_in_work"])
            if free == total and set(busy) == {"0.0"}:
                break
            assert time.monotonic() < deadline, f"not idle: {free} of {total} blocks free, {busy}"
            time.sleep(0.02)
        assert self.get("/health").json() == {"status": "ok"}


class Running(Reachable):
    """A server that is running, with the tiny checkpoint of a family or with what lies in a folder."""

    def __init__(self, family: str | Path = "qwen2_vl", engine: dict[str, Any] | None = None, **options: Any) -> None:
        self.options = replace(SMALL, **options)
        self.listener = listen(self.options)
        port = 0 if self.options.uds else self.listener.getsockname()[1]
        super().__init__(port, "https" if self.options.ssl_certfile else "http", self.options.api_keys)
        folder = family if isinstance(family, Path) else tiny.checkpoint(family)
        self.llm = AsyncLLM(str(folder), **(ENGINE if engine is None else engine))
        self.server, self.app = make(self.llm, self.options)
        self.admission = self.server._admission
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self.server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.server.started

    def close(self) -> None:
        """End the server and its engine."""
        super().close()
        self.server.should_exit = True
        self._thread.join(10)
        state = self.server.server_state
        if self._thread.is_alive():
            # A thread that the loop waits for is in no task.
            faulthandler.dump_traceback(sys.__stderr__)
        assert not self._thread.is_alive(), f"open: {[vars(one) for one in state.connections]}, {state.tasks}"
        self.llm.close()


def listens(port: int) -> bool:
    """True if a connection is taken there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def serving(folder: Path, flags: dict[str, str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`beheld serve` in a process of its own, and its port: nothing but the server is measured then.

    `flags` are names without their dashes, with values; `log` is a file for what the server writes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "beheld.cli.main", "serve", str(folder), "--port", str(port)]
    command += [word for name, value in flags.items() for word in (f"--{name}", value)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while not listens(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process, port
    finally:
        process.kill()
        process.wait()


@contextmanager
def watched(running: Running) -> Iterator[list[float]]:
    """Delay of the event loop, in seconds, while something went on; at most what this process computed meanwhile, for
    what other processes take of the cores is no delay of ours."""
    loop = running.server._loop
    assert loop is not None
    late: list[float] = []
    stop = threading.Event()

    def tick(due: float, computed: float) -> None:
        late.append(min(time.monotonic() - due, time.process_time() - computed))
        if not stop.is_set():
            loop.call_later(0.005, tick, time.monotonic() + 0.005, time.process_time())

    loop.call_soon_threadsafe(tick, time.monotonic(), time.process_time())
    yield late
    stop.set()


def received(link: socket.socket) -> bytes:
    """All bytes until the end, or until the socket's timeout."""
    data = b""
    try:
        while piece := link.recv(1 << 16):
            data += piece
    except (TimeoutError, ConnectionError):
        pass
    return data


def request_bytes(path: str, body: Any, *headers: str) -> bytes:
    """A POST as it stands on the wire; the connection is closed after it."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", *headers, "", ""]).encode() + data


def data_url(width: int = 84, height: int = 56, seed: int = 1) -> str:
    """A picture as a data URL."""
    file = io.BytesIO()
    tiny.picture(width, height, seed).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def talk(text: str = "What is it?", *urls: str) -> list[dict[str, Any]]:
    """One user's message with pictures."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def source_of(url: str) -> dict[str, Any]:
    """A picture's URL as the source of an image block of Anthropic's."""
    head, _, data = url.partition(";base64,")
    if not data:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
