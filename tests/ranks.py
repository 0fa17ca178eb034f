"""Ranks and engines for tests, forked from a process that has imported the libraries: a fresh one takes seconds for it.

`forked` makes MultiExecutor start its ranks there, `forked_engines` a data parallel front its engines. Run as a
program, this file is that process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from beheld.cluster import remote
from beheld.core.config import EngineConfig
from beheld.engine import process, process_group
from beheld.executor import multi, ray
from beheld.executor.watchdog import RankProcess
from beheld.executor.wire import CODEC
from beheld.wire.link import Link, pair

SPAWN = multi._spawn
"""Starts a fresh process."""
TOKEN = b"known to forked ranks of other hosts"
FAILING = set[int]()
"""Forked ranks with these numbers, of stages before the last, fail once: amid their third pass."""
LOOPING = set[int]()
"""Forked ranks with these numbers never come back from their third step."""
FULL = set[int]()
"""Forked ranks with these numbers get no more memory from their third step on, and need some in each."""
TOWERS_FAILING = set[int]()
"""Forked ranks with these numbers fail in each tower while the file `towers_fail` of the test's process is there."""


def towers_fail(process: int) -> Path:
    """The file of a test's process."""
    return Path(tempfile.gettempdir()) / f"beheld-towers-fail-{process}"


def fail_in_towers(process: int) -> None:
    """Make this process fail in each tower while the file of a test's process is there."""
    from beheld.models.rank_towers import RankTowers

    encode = RankTowers.encode

    def failing(self: RankTowers, items: Any, made: Any) -> Any:
        def fail(own: Any) -> Any:
            raise ValueError("a tower fails")

        return encode(self, items, fail if towers_fail(process).exists() else made)

    RankTowers.encode = failing  # type: ignore[method-assign]


class Forked:
    """A grandchild of this process, with the methods of Popen that MultiExecutor calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it runs. Nobody learns its exit code."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
                return 0 if file.read().rpartition(")")[2].split()[0] == "Z" else None
        except OSError:
            return 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended."""
        until = time.monotonic() + (60.0 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.005)
        return 0

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class OneRay:
    """The calls of Ray that RemoteProcess makes, over a Forked."""

    def wait(self, running: list[Forked], timeout: float) -> tuple[list[Forked], list[Forked]]:
        """Those that have ended, and those that have not."""
        done = [each for each in running if each.poll() is not None]
        return done, [each for each in running if each.poll() is None]

    def kill(self, actor: Forked, *, no_restart: bool) -> None:
        """End it."""
        actor.kill()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    return ours, theirs


@contextlib.contextmanager
def _forking() -> Iterator[socket.socket]:
    """Within the block, a process forks others when it is asked on the socket."""
    control, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.ranks", str(theirs.fileno())]
        environment = multi._environment(1, "cpu") | {"OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
    try:
        yield control
    finally:
        control.close()
        # It has nothing to save, and its own end takes seconds.
        server.kill()
        server.wait()


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Within the block, engines behind a data parallel front are forked from one process, with one thread each."""
    turn = threading.Lock()

    def spawn(environment: Mapping[str, str] | None = None) -> process.Spawned:
        ours, ends = pair()
        with ends, turn:
            socket.send_fds(control, [b"e"], [ends.fileno()])
            child = Forked(int(control.recv(16)))
        return process.Spawned(child, ours, environment)  # type: ignore[arg-type]

    with _forking() as control, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "spawn", spawn)
        yield


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Within the block, ranks are forked from one process; those that Ray would place, too, connected by TCP."""

    def spawn(rank: int, config: EngineConfig) -> RankProcess:
        ours, ends = pair()
        with ends:
            kinds = {b"x": FAILING, b"y": TOWERS_FAILING, b"l": LOOPING, b"m": FULL}
            kind = next((kind for kind, numbers in kinds.items() if rank in numbers), b"f")
            socket.send_fds(control, [kind], [ends.fileno()])
        answer = control.recv(16)
        process = Forked(int(answer))
        return RankProcess(rank, process, Link(ours, CODEC, 2))  # type: ignore[arg-type]

    def place(wanted: remote.Placement) -> remote.Group:
        processes, ends = [], []
        for number in range(1, wanted.count + 1):
            ours, theirs = _connected()
            with theirs:
                socket.send_fds(control, [b"t"], [theirs.fileno()])
            child = Forked(int(control.recv(16)))
            process = remote.RemoteProcess(OneRay(), child, child, child, number)
            process.joined(ours)
            processes.append(process)
            ends.append(ours)
        return remote.Group(processes, ends, "127.0.0.1", TOKEN, lambda: None)

    with _forking() as control, pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi, "_spawn", spawn)
        patch.setattr(ray, "start", place)
        yield


def _fail_once() -> None:
    from beheld.runner.pipeline import Pipeline

    send, passes = Pipeline.send, itertools.count(1)

    def failing(self: Pipeline, *given: Any) -> None:
        if next(passes) == 3:
            raise RuntimeError("this stage fails")
        send(self, *given)

    Pipeline.send = failing  # type: ignore[method-assign]


def _loop_in_a_step() -> None:
    from beheld.runner.runner import ModelRunner

    launch, steps = ModelRunner.launch, itertools.count(1)

    def looping(self: ModelRunner, plan: Any) -> Any:
        number = next(steps)
        while number == 3:
            pass
        return launch(self, plan)

    ModelRunner.launch = looping  # type: ignore[method-assign]


def _run_out_of_memory() -> None:
    import resource

    import torch

    from beheld.runner.runner import ModelRunner

    launch, steps = ModelRunner._launch, itertools.count(1)

    def full(self: ModelRunner, plan: Any) -> Any:
        if next(steps) >= 3:
            with open("/proc/self/statm", encoding="ascii") as file:
                held = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held, held))
            torch.empty(1 << 30, dtype=torch.uint8)
        return launch(self, plan)

    ModelRunner._launch = full  # type: ignore[method-assign]


def _serve(descriptor: int) -> None:
    import importlib

    import torch

    from beheld.executor import rank

    for name in (
        "beheld.engine.setup",
        "beheld.engine.loop",
        "beheld.runner.build",
        "beheld.models.hf",
        "beheld.models.surgery.operations",
        "beheld.parallel.group",
    ):
        importlib.import_module(name)
    importlib.import_module("transformers.models.llama.modeling_llama")
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control, tests = socket.socket(fileno=descriptor), os.getppid()
    while True:
        command, files, _, _ = socket.recv_fds(control, 1, 1)
        if not command:
            return
        number = os.fork()
        if number == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                if command == b"x":
                    _fail_once()
                if command == b"y":
                    fail_in_towers(tests)
                if command == b"l":
                    _loop_in_a_step()
                if command == b"m":
                    _run_out_of_memory()
                if command == b"e":
                    os.setsid()
                    process.main(files[0])
                elif command == b"t":
                    rank.main_elsewhere(socket.socket(fileno=files[0]), TOKEN)
                else:
                    rank.main(files[0])
            finally:
                os._exit(0)
        os.close(files[0])
        control.sendall(str(number).encode())


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
