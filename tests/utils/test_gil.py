"""Threads that prepare take turns, few at a time; all others pass."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from beheld.utils import gil
from beheld.utils.gil import _MOST_AT_WORK, in_turn, out_of_turn, take_turns


class Inside:
    """Counts who is within its block at a time."""

    def __init__(self) -> None:
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._now -= 1


def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, initializer=take_turns)


def test_few_are_at_work_at_a_time_and_one_that_fails_makes_room() -> None:
    inside = Inside()

    def work(number: int) -> int:
        with in_turn():
            with inside:
                time.sleep(0.005)
            if number % 3 == 0:
                raise ValueError(number)
        return number

    with pool(8) as threads:
        made = [threads.submit(work, number) for number in range(40)]
    assert inside.most == _MOST_AT_WORK
    for number, future in enumerate(made):
        if number % 3 == 0:
            with pytest.raises(ValueError, match=str(number)):
                future.result()
        else:
            assert future.result() == number


def both_taken(then: Callable[[], None]) -> None:
    """Call `then` while other threads have all the turns."""
    taken, done = threading.Barrier(_MOST_AT_WORK + 1, timeout=10), threading.Event()

    def hold() -> None:
        with in_turn():
            taken.wait()
            assert done.wait(10)

    with pool(_MOST_AT_WORK) as threads:
        held = [threads.submit(hold) for _ in range(_MOST_AT_WORK)]
        taken.wait()
        then()
        done.set()
        for one in held:
            one.result(10)


def test_who_takes_no_turns_passes() -> None:
    """As the thread that drives a device, which may be interrupted anywhere."""

    def pass_by() -> None:
        with in_turn(), out_of_turn(), in_turn():
            pass

    def elsewhere() -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(pass_by).result(5)

    both_taken(pass_by)
    both_taken(elsewhere)


def test_a_turn_is_another_s_while_its_owner_waits() -> None:
    inside, outside = Inside(), Inside()

    def work() -> None:
        with in_turn(), in_turn():
            with inside:
                time.sleep(0.002)
            with out_of_turn(), out_of_turn(), outside:
                time.sleep(0.02)
            with inside:
                time.sleep(0.002)

    with pool(8) as threads:
        for one in [threads.submit(work) for _ in range(16)]:
            one.result(10)
    assert inside.most == _MOST_AT_WORK < outside.most


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_process_has_all_turns() -> None:
    def in_a_child() -> None:
        child = os.fork()
        if child == 0:
            os._exit(gil._free.qsize())
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == _MOST_AT_WORK

    both_taken(in_a_child)
