"""Threads that prepare take turns, few at a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from beheld.utils.interpreter import _MOST_AT_WORK, in_turn


def test_few_are_at_work_at_a_time_and_one_that_fails_makes_room() -> None:
    lock, inside, most = threading.Lock(), [0], [0]

    def work(number: int) -> int:
        with in_turn():
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0.005)
            with lock:
                inside[0] -= 1
            if number % 3 == 0:
                raise ValueError(number)
        return number

    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(work, number) for number in range(40)]
    assert most[0] == _MOST_AT_WORK
    for number, future in enumerate(made):
        if number % 3 == 0:
            with pytest.raises(ValueError, match=str(number)):
                future.result()
        else:
            assert future.result() == number
