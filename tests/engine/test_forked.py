"""A process that is a copy of this one: what it keeps, how it ends, and when there is none."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from beheld.engine import process, setup
from beheld.engine.codec import CODEC
from beheld.engine.forked import ForkedProcess
from beheld.wire.link import Link, pair

# Each runs in a process of its own: pytest's may have threads, and a copy of it would be large.
_KEPT = """
import json, os, signal, socket, threading
from beheld.engine.forked import can_fork, fork
assert can_fork()
listening = socket.create_server(("127.0.0.1", 0))
signal.signal(signal.SIGTERM, lambda *_: None)
ours, theirs = socket.socketpair()
def child(file):
    found = {
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
        "own": file,
        "name": open("/proc/self/comm").read(),
        "leads": os.getsid(0) == os.getpid(),
        "default": signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_DFL,
    }
    socket.socket(fileno=file).sendall(json.dumps(found).encode())
copy = fork(child, theirs.fileno(), "named")
theirs.close()
print(ours.recv(4096).decode())
print(copy.wait(60), listening.fileno() > 2)
"""
_ENDS = """
import subprocess, time
from beheld.engine.forked import fork
def fails(file):
    raise ValueError("told")
copy = fork(fails, 2, "fails")
print(copy.wait(60), copy.poll())
copy = fork(lambda file: time.sleep(60), 2, "sleeps")
print(copy.poll())
try:
    copy.wait(0.05)
except subprocess.TimeoutExpired:
    print("not yet")
copy.kill()
print(copy.wait(60), copy.wait())
copy.kill()
"""
# In a sandbox: no list of open files, a name that cannot be set, and no standard output.
_BARE = """
import builtins, os, sys
from beheld.engine.forked import fork
sys.stdout = None
sys.stderr.close()
listing, opening = os.listdir, builtins.open
def refuses(right):
    def refuse(path, *more, **named):
        if str(path).startswith("/proc/self/"):
            raise OSError(30, "Read-only file system")
        return right(path, *more, **named)
    return refuse
os.listdir, builtins.open = refuses(listing), refuses(opening)
other = os.open("/dev/null", os.O_RDONLY)
ours, theirs = os.pipe()
late = os.open("/dev/null", os.O_RDONLY)
def child(file):
    for number in (other, ours, late):
        try:
            os.fstat(number)
        except OSError:
            os.write(file, b"closed ")
code = fork(child, theirs, "bare").wait(60)
os.write(1, os.read(ours, 99) + str(code).encode())
"""
# The signal comes before the copy has left the parent's handlers.
_INTERRUPTED = """
import os, signal
from beheld.engine.forked import fork
signal.signal(signal.SIGINT, lambda *_: print("the parent's", os.getpid() == parent, flush=True))
parent, right = os.getpid(), os.fork
def interrupted():
    pid = right()
    os.kill(os.getpid(), signal.SIGINT)
    return pid
os.fork = interrupted
print(fork(lambda file: None, 2, "interrupted").wait(60), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def _said(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)


def test_a_copy_keeps_one_descriptor_and_none_of_its_parents_handlers() -> None:
    found, ended = _said(_KEPT).stdout.splitlines()
    told: dict[str, Any] = json.loads(found)
    assert [file for file in told["files"] if file > 2] == [told["own"]]
    assert told["name"] == "named\n"
    assert told["leads"]
    assert told["default"]
    assert ended == "0 True"


def test_a_copy_that_fails_or_is_killed_tells_how_it_ended() -> None:
    done = _said(_ENDS)
    assert done.stdout.splitlines() == ["1 1", "None", "not yet", "-9 -9"]
    assert "ValueError: told" in done.stderr


def test_a_copy_starts_where_nothing_is_listed_or_named_and_streams_are_closed() -> None:
    assert _said(_BARE).stdout == "closed closed closed 0"


def test_a_signal_right_after_the_fork_does_not_run_the_parents_handler_in_the_copy() -> None:
    assert _said(_INTERRUPTED).stdout.splitlines() == ["the parent's True", "-2 set()"]


def test_a_process_that_another_thread_waits_for_is_killed_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = subprocess.Popen(["sleep", "60"])
    copy = ForkedProcess(begun.pid)
    right = os.kill
    other = threading.Thread(target=copy.wait)

    def kill(pid: int, number: int) -> None:
        right(pid, number)
        # It has ended, and is not waited for before this returns: twice the same id.
        other.start()
        other.join(0.2)
        right(pid, number)

    monkeypatch.setattr(os, "kill", kill)
    try:
        copy.kill()
        assert copy.wait(60) == -9
    finally:
        monkeypatch.undo()
        other.join()
        with suppress(OSError):
            begun.kill()


def test_an_engine_whose_options_are_refused_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "preload", lambda: None)
    monkeypatch.setattr(process, "begin_driver", lambda device: None)
    ours, theirs = pair()
    ours.close()
    with theirs:
        process._run(Link(theirs, CODEC))


def test_next_to_another_thread_a_new_program_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(process, "spawn", lambda: begun.append("spawned"))
    monkeypatch.setattr(process, "fork", lambda *_: begun.append("forked"))
    until = threading.Event()
    other = threading.Thread(target=until.wait)
    other.start()
    try:
        process.fork_or_spawn()
    finally:
        until.set()
        other.join()
    assert begun == ["spawned"]


def test_a_system_that_refuses_a_copy_starts_a_new_program(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def refuses(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(process, "spawn", lambda: begun.append("spawned"))
    monkeypatch.setattr(process, "can_fork", lambda: True)
    monkeypatch.setattr(process, "fork", refuses)
    process.fork_or_spawn()
    assert begun == ["spawned"]


def test_an_engine_that_is_a_copy_ends_with_the_other_side() -> None:
    code = "from beheld.engine.process import fork_or_spawn as f\nb = f()\nb.end.close()\nprint(b.process.wait(60))"
    assert _said(code).stdout == "0\n"
