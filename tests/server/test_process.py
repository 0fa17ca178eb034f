"""One lasting server as a process, without a disk to write to, through faults around it (cases by their number)."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.server.running import received, request_bytes

SECRET = "s3cretword"


@dataclass
class Lasting:
    """A server: its process, its engine's, its port, and the file of what it says."""

    process: subprocess.Popen[bytes]
    engine: int
    port: int
    log: Path

    def get(self, path: str, timeout: float = 30.0) -> int:
        """The status of a GET."""
        headers = {"Authorization": f"Bearer {SECRET}"}
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.get(url, headers=headers, timeout=timeout, trust_env=False, verify=False).status_code

    def complete(self, **options: Any) -> httpx.Response:
        """A short greedy completion."""
        body = {"prompt": f"x {SECRET}", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
        headers = {"Authorization": f"Bearer {SECRET}"}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False, verify=False)


@pytest.fixture(scope="module")
def lasting() -> Iterator[Lasting]:
    """A server with its engine in a process, which finds neither a home nor a folder for temporary files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "beheld.cli.main", "serve", str(tiny.checkpoint("llama")), "--port", str(port)]
    flags = ["--num-gpu-blocks-override", "300", "--max-model-len", "2048", "--engine", "process"]
    nowhere = {"TMPDIR": "/proc/self/none", "HOME": "/proc/self/none", "XDG_CACHE_HOME": "/proc/self/none"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*command, *flags], stdout=file, stderr=file, env={**os.environ, **nowhere, "BEHELD_API_KEY": SECRET}
            )
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    url = f"http://127.0.0.1:{port}/health"
                    if httpx.get(url, timeout=5, trust_env=False, verify=False).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            assert process.poll() is None, log.read_text()
            (engine,) = children(process.pid)
            yield Lasting(process, engine, port, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_71_without_a_disk_it_serves(lasting: Lasting) -> None:
    one, two = lasting.complete(), lasting.complete()
    assert one.status_code == 200, one.text
    assert one.json()["choices"][0]["text"] == two.json()["choices"][0]["text"]
    assert lasting.get("/metrics") == 200


def test_its_engine_is_a_copy_that_imports_no_library_again(lasting: Lasting) -> None:
    programs = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (lasting.process.pid, lasting.engine)]
    assert programs[0] == programs[1]
    assert Path(f"/proc/{lasting.engine}/comm").read_text() == "beheld-engine\n"


def test_19_only_its_own_port_listens(lasting: Lasting) -> None:
    for pid in (lasting.process.pid, lasting.engine):
        held = set()
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:
                continue
        inodes = {link[8:-1] for link in held if link.startswith("socket:[")}
        listening = []
        for table in ("tcp", "tcp6"):
            with open(f"/proc/{pid}/net/{table}") as file:
                rows = [line.split() for line in file][1:]
            listening += [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]
        with open(f"/proc/{pid}/net/unix") as file:
            # Flag 0x10000: it listens. A name at the end: others could find it.
            rows = [line.split() for line in file][1:]
        named = [row[7:] for row in rows if row[6] in inodes and (int(row[3], 16) & 0x10000 or len(row) > 7)]
        own = f"0100007F:{lasting.port:04X}"
        assert listening == ([own] if pid == lasting.process.pid else [])
        assert not named


def test_75_without_descriptors_it_waits_and_goes_on(lasting: Lasting) -> None:
    pid = lasting.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    links = []
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + 8, before[1]))
        for _ in range(40):
            links.append(socket.create_connection(("127.0.0.1", lasting.port), timeout=5))
        time.sleep(0.3)
        assert lasting.process.poll() is None
    finally:
        for link in links:
            link.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    deadline = time.monotonic() + 10
    while True:
        try:
            assert lasting.complete().status_code == 200
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline


def test_67_a_stopped_engine_is_told_of_until_it_goes_on(lasting: Lasting) -> None:
    calm = lasting.complete(max_tokens=200).json()["choices"][0]["text"]
    found: list[str] = []
    thread = threading.Thread(
        target=lambda: found.append(lasting.complete(max_tokens=200).json()["choices"][0]["text"])
    )
    os.kill(lasting.engine, signal.SIGSTOP)
    try:
        thread.start()
        begin = time.monotonic()
        while lasting.get("/health", 5) != 503:
            assert time.monotonic() - begin < 12
            time.sleep(0.1)
        # What needs no engine is answered.
        assert lasting.get("/v1/models") == 200
    finally:
        os.kill(lasting.engine, signal.SIGCONT)
    thread.join(30)
    assert found == [calm]
    deadline = time.monotonic() + 5
    while lasting.get("/health") != 200:
        assert time.monotonic() < deadline


def test_77_what_it_said_holds_no_secret(lasting: Lasting) -> None:
    lasting.complete(prompt=SECRET * 3000)
    lasting.complete(**{SECRET: 1})
    with socket.create_connection(("127.0.0.1", lasting.port), timeout=5) as link:
        link.sendall(f"\x00\x1b[31m{SECRET}\r\n\r\n".encode())
        received(link)
    log = lasting.log.read_text()
    assert SECRET not in log
    assert "\x1b" not in log
    assert "Traceback" not in log
    lines = [line for line in log.splitlines() if " complete " in line]
    assert len(lines) >= 4
    for line in lines:
        assert re.search(r"req-[0-9a-f]{32} complete \d{3} \d+ ms$", line), line


def test_66_after_all_this_a_killed_engine_still_ends_it_in_order(lasting: Lasting) -> None:
    with socket.create_connection(("127.0.0.1", lasting.port), timeout=20) as link:
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        link.sendall(request_bytes("/v1/completions", body, f"Authorization: Bearer {SECRET}"))
        head = link.recv(100)
        begin = time.monotonic()
        os.kill(lasting.engine, signal.SIGKILL)
        rest = head + received(link)
        assert time.monotonic() - begin < 2.0
    assert b"engine_dead" in rest
    assert b"data: [DONE]" in rest
    assert lasting.get("/health") == 503
    assert lasting.process.wait(15) == 3
    told = [line for line in lasting.log.read_text().splitlines() if "ERROR" in line and "The engine has died" in line]
    assert len(told) == 1, lasting.log.read_text()
    assert "status 3" in told[0]
