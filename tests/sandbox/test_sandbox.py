"""Workers that are killed, stall, eat memory or answer nonsense cost their own task and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beheld.core.errors import ConfigError, DecodeError, EngineError, WorkerError
from beheld.sandbox.sandbox import Sandbox
from beheld.sandbox.task_type import Fault, TaskType, WorkerFault
from beheld.utils.cancellation import Cancelled, CancelToken
from beheld.utils.cpu_weight import NICE
from tests.sandbox import tasks
from tests.server.slowness import slowness

MIB = 1 << 20


class Pool:
    """A sandbox with one task type; each task has its own time."""

    def __init__(self, count: int, memory_mib: int, settings: dict[str, Any]) -> None:
        self.sandbox = Sandbox()
        self.kind: TaskType[Any, Any] = TaskType(
            load=tasks.load,
            settings=lambda: settings,
            answer=object,
            timeout_s=lambda task: float(task[2]),
            memory_bytes=memory_mib * MIB,
            max_workers=count,
            error=lambda task, fault: fault,
        )

    def run(self, task: tuple[str, Any], timeout_s: float, cancel: CancelToken | None = None, client: str = "") -> Any:
        return self.sandbox.run(self.kind, (*task, timeout_s), cancel, client)

    def pids(self) -> tuple[int, ...]:
        return self.sandbox.pids(self.kind)

    @property
    def server_pid(self) -> int | None:
        return self.sandbox.server_pid(self.kind)

    def close(self) -> None:
        self.sandbox.close()


def make(count: int = 2, memory_mib: int = 96, **settings: Any) -> Pool:
    return Pool(count, memory_mib, settings)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = make()
    yield made
    made.close()


def alive(number: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        state = Path(f"/proc/{number}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(numbers: list[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(map(alive, numbers)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, numbers))


def test_answers_come_back_whole(pool: Pool) -> None:
    for value in (None, "text", b"bytes", {"a": [1, (2, 3)]}, b"x" * (3 * MIB)):
        assert pool.run(("echo", value), 10) == value
    rng = np.random.default_rng(0)
    for shape in ((0, 3), (5,), (700, 700, 3)):
        array = rng.integers(0, 255, shape, dtype=np.uint8)
        found = pool.run(("echo", array), 10)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_what_the_work_raises_is_raised_here(pool: Pool) -> None:
    with pytest.raises(DecodeError, match=r"It is broken\. Mend it\."):
        pool.run(("refuse", "It is broken."), 10)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        pool.run(("divide", 0), 10)
    assert len(pool.pids()) == 1, "neither cost a process"


FAULTS: dict[str, tuple[tuple[str, Any], Fault, str]] = {
    "killed": (("kill", signal.SIGKILL), Fault.ENDED, "SIGKILL"),
    "segmentation fault": (("kill", signal.SIGSEGV), Fault.ENDED, "SIGSEGV"),
    "exit": (("exit", 3), Fault.ENDED, "exit code 3"),
    "sleeps": (("sleep", 60), Fault.TIME, ""),
    "spins": (("spin", None), Fault.TIME, ""),
    "stopped": (("stop", None), Fault.TIME, ""),
    "eats": (("eat", 64), Fault.MEMORY, ""),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_31_a_fault_costs_its_task_alone(pool: Pool, name: str) -> None:
    task, fault, how = FAULTS[name]
    before = pool.run(("pid", None), 10)
    neighbour: list[Any] = []
    beside = threading.Thread(target=lambda: neighbour.append(pool.run(("sleep", 0.6), 10)))
    beside.start()
    begin = time.monotonic()
    with pytest.raises(WorkerFault) as caught:
        pool.run(task, 0.4 if fault is Fault.TIME else 10)
    assert caught.value.fault is fault
    assert how in caught.value.how
    assert fault is not Fault.TIME or time.monotonic() - begin < 5.0
    begin = time.monotonic()
    assert pool.run(("echo", 1), 10) == 1, "the pool is whole again"
    assert time.monotonic() - begin < 1.0 * slowness()
    beside.join()
    assert neighbour == [None], "the task beside it never heard of it"
    assert len(pool.pids()) <= 2
    assert before not in pool.pids() or alive(before)


@pytest.mark.parametrize("task", [("sleep", 60), ("spin", None), ("stop", None)], ids=lambda task: str(task[0]))
def test_61_who_leaves_takes_the_work_along(task: tuple[str, Any]) -> None:
    """Both the one that is worked for and the one that waits for a worker."""
    pool = make(1)
    pool.run(("echo", 1), 10)
    (number,) = pool.pids()
    one, other = CancelToken(), CancelToken()
    ended: list[str] = []

    def ask(name: str, cancel: CancelToken) -> None:
        try:
            pool.run(task, 60, cancel)
        except Cancelled:
            ended.append(name)

    threads = [threading.Thread(target=ask, args=given) for given in (("one", one), ("other", other))]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    other.cancel()
    threads[1].join(10)
    assert ended == ["other"]
    assert alive(number), "who waits has no worker to take along"
    one.cancel()
    threads[0].join(10)
    assert ended == ["other", "one"]
    assert gone([number], 10)
    begin = time.monotonic()
    assert pool.run(("echo", 2), 10, CancelToken()) == 2
    assert time.monotonic() - begin < 1.0 * slowness()
    with pytest.raises(Cancelled):
        pool.run(("echo", 3), 10, one)
    assert len(pool.pids()) == 1
    pool.close()


def test_61_leaving_in_every_moment_costs_no_other_task() -> None:
    """Half of those who ask leave at some moment or other; the answers of the others are whole."""
    pool = make(2)
    chance = random.Random(0)
    waits = [chance.uniform(0.0, 0.006) for _ in range(200)]

    def ask(number: int) -> int | None:
        cancel = CancelToken()
        if number % 2:
            threading.Timer(waits[number], cancel.cancel).start()
        try:
            found: int = pool.run(("echo", number), 20, cancel)
        except Cancelled:
            assert number % 2
            return None
        return found

    with ThreadPoolExecutor(6) as callers:
        found = list(callers.map(ask, range(200)))
    assert found[::2] == list(range(0, 200, 2))
    assert all(answer in (None, number) for number, answer in enumerate(found))
    group = pool.sandbox._group(pool.kind)
    assert not group._turns._held
    assert not group._turns._waiting
    assert not group._busy
    pool.close()


def test_31_a_worker_killed_while_it_idles_costs_nothing(pool: Pool) -> None:
    number = pool.run(("pid", None), 10)
    os.kill(number, signal.SIGKILL)
    assert gone([number], 2)
    assert pool.run(("pid", None), 10) != number


def test_66_a_fork_server_killed_takes_its_workers_and_comes_back() -> None:
    pool = make()
    assert pool.run(("echo", 1), 10) == 1
    server, workers = pool.server_pid, list(pool.pids())
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert gone([server, *workers], 2)
    assert pool.run(("echo", 2), 10) == 2
    busy = threading.Thread(target=lambda: os.kill(pool.server_pid or 0, signal.SIGKILL))
    busy.start()
    with pytest.raises(WorkerFault):
        pool.run(("spin", None), 10)
    busy.join()
    assert pool.run(("echo", 3), 10) == 3
    pool.close()


def test_many_callers_and_never_more_than_the_count() -> None:
    pool = make(3)
    with ThreadPoolExecutor(12) as callers:
        found = list(callers.map(lambda n: pool.run(("echo", n), 20), range(200)))
        assert found == list(range(200))
        numbers = set(callers.map(lambda _: pool.run(("pid", None), 20), range(50)))
    assert numbers <= set(pool.pids())
    assert len(pool.pids()) <= 3
    pool.close()
    with pytest.raises(WorkerError, match="closed"):
        pool.run(("echo", 1), 1)


def test_closing_ends_every_process_and_whoever_waits() -> None:
    pool = make(1)
    pool.run(("echo", 1), 10)
    numbers = [*pool.pids(), pool.server_pid or 0]
    errors: list[Exception] = []

    def ask() -> None:
        try:
            pool.run(("sleep", 60), 60)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    pool.close()
    for thread in threads:
        thread.join(5)
    assert gone(numbers, 2)
    assert len(errors) == 3
    assert all(isinstance(error, WorkerFault | WorkerError) for error in errors)


def test_what_loading_says_is_said_with_every_task() -> None:
    pool = make(refuse=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="not like this"):
            pool.run(("echo", 1), 10)
    assert pool.server_pid is None
    pool = make(die=True)
    with pytest.raises(WorkerError):
        pool.run(("echo", 1), 10)


def test_18_an_answer_that_is_none_ends_its_worker(pool: Pool) -> None:
    with pytest.raises(WorkerFault) as caught:
        pool.run(("garbage", None), 5)
    assert caught.value.fault is Fault.ENDED
    assert pool.run(("echo", 1), 10) == 1


PARENT = """
import sys, threading, time
from tests.sandbox.test_sandbox import make
pool = make(2)
def spin():
    try:
        pool.run(("spin", None), 60)
    except Exception:
        pass
threading.Thread(target=spin, daemon=True).start()
pool.run(("echo", 1), 10)
time.sleep(0.2)
print(pool.server_pid, *pool.pids(), flush=True)
time.sleep(60)
"""


def test_68_nothing_is_left_of_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        numbers = [int(word) for word in parent.stdout.readline().split()]
        assert len(numbers) == 3
        assert all(map(alive, numbers))
        parent.kill()
    assert gone(numbers, 5)


def test_large_answers_leave_no_descriptors(pool: Pool) -> None:
    pool.run(("echo", 1), 10)
    files = len(os.listdir("/proc/self/fd"))
    kept = [pool.run(("zeros", MIB), 10) for _ in range(4)]
    assert len(os.listdir("/proc/self/fd")) == files
    kept[0][:] = 7
    assert kept[0].sum() == 7 * MIB, "it may be written to"


def test_a_worker_keeps_the_memory_of_its_last_item() -> None:
    """Mapped anew for each item, its arrays took a third of the time that preparing five tiles of 384 x 384 took."""
    made = make(1)
    try:
        size = 8 * MIB
        assert made.run(("pages", size), 10) > size // os.sysconf("SC_PAGE_SIZE")
        assert made.run(("pages", size), 10) < size // os.sysconf("SC_PAGE_SIZE") // 10
    finally:
        made.close()


@pytest.mark.case(131)
def test_workers_weigh_less_than_the_server() -> None:
    made = make(1)
    try:
        number = made.run(("pid", None), 10)
        assert os.getpriority(os.PRIO_PROCESS, number) == max(NICE, os.getpriority(os.PRIO_PROCESS, 0))
    finally:
        made.close()


@pytest.mark.case(131)
@pytest.mark.skipif(not os.access("/proc/self/autogroup", os.W_OK), reason="the kernel has no groups of sessions")
def test_the_session_of_workers_weighs_less_than_the_server() -> None:
    """Where the kernel divides the cores between sessions, the priority of a process counts only within its own."""
    made = make(1)
    try:
        for _ in range(10):
            number = made.run(("pid", None), 10)
            if int(Path(f"/proc/{number}/autogroup").read_text(encoding="ascii").split()[-1]) == NICE:
                return
            # Without privileges the kernel takes such a wish only now and then; the next worker asks again.
            os.kill(number, signal.SIGKILL)
            time.sleep(0.15)
        raise AssertionError("the session has the server's priority")
    finally:
        made.close()
