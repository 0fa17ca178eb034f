"""Two nodes of a real Ray in two network namespaces, which stand for two hosts. Needs Ray, root and `ip`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import start_node
from tests.long import LONG

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not LONG, reason="a cluster takes half a minute to start")

# Addresses that are kept for documents (RFC 5737).
FIRST, SECOND = "192.0.2.1", "192.0.2.2"
LIMIT_S = 10.0


@dataclass
class Hosts:
    """Two namespaces joined by a cable, with a node of Ray in each."""

    first: str
    second: str

    def inside(self, where: str, *command: str) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", where, *command]

    def cut(self) -> None:
        """Pull the cable out: no connection is closed."""
        _ip("-n", self.second, "link", "set", "eth0", "down")


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _end_all(where: str) -> None:
    for number in _ip("netns", "pids", where).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = [f"beheld-{os.getpid()}-{which}" for which in ("a", "b")]
    made = Hosts(*names)
    # Ray's sockets have paths of at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces: {error}")
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
        head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
        for name, address, more in zip(names, (FIRST, SECOND), (head, [f"--address={FIRST}:6379"]), strict=True):
            ray = [str(Path(sys.executable).with_name("ray")), "start", f"--node-ip-address={address}", *more]
            sizes = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
            start_node(made.inside(name, *ray, *sizes), functools.partial(_end_all, name))
        yield made
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _end_all(name)
                _ip("netns", "del", name)
        shutil.rmtree(folder, ignore_errors=True)


def test_tokens_are_those_of_one_host_and_a_lost_host_ends_the_engine(hosts: Hosts) -> None:
    splits = ("dp", "pp", "tp")
    command = hosts.inside(hosts.first, sys.executable, "-m", "tests.cluster.first_host", *splits)
    environment = os.environ | {"RAY_ADDRESS": f"{FIRST}:6379", "BEHELD_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            said: list[dict[str, Any]] = []
            for split in splits:
                said.append(json.loads(process.stdout.readline()))
                ranks = [] if split == "dp" else [SECOND]
                assert said[-1] == {"split": split, "same": True, "hosts": ranks}
            for _ in range(2):
                assert json.loads(process.stdout.readline()) == {"answering": True}
            cut_at = time.monotonic()
            hosts.cut()
            while "answering" in (line := process.stdout.readline()):
                pass
            took_s = time.monotonic() - cut_at
            assert "rank 1" in json.loads(line)["error"]
            assert took_s < LIMIT_S
            assert json.loads(process.stdout.readline()) == {"ended": True}
            assert process.wait(60) == 0
        finally:
            process.kill()
