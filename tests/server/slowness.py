"""How much slower than it should be the machine is at the moment, for bounds in milliseconds."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

# What `_work` takes on an idle core of the machines that the bounds were set for.
_IDLE_S = 0.010


def slowness(clock: Callable[[], float] = time.perf_counter) -> float:
    """1 for an idle core of 2020 or later, and more for a slower or a busy one: what a fixed piece of Python takes (the
    median of five times) over what it takes there. Never less: a faster machine has no tighter bounds. By
    `time.thread_time`, for bounds of processor time, only a slower core counts."""
    return max(1.0, statistics.median(_work(clock) for _ in range(5)) / _IDLE_S)


def best(measure: Callable[[], float], bound: float, rounds: int = 6) -> float:
    """The least of some measurements, of which no more are made than it takes to come below a bound: what else runs on
    the machine only adds to times."""
    found = [measure()]
    while min(found) >= bound and len(found) < rounds:
        found.append(measure())
    return min(found)


def p99(seconds: Sequence[float]) -> float:
    """The 99th percentile; of fewer than a hundred, the largest."""
    return sorted(seconds)[int(0.99 * len(seconds))]


def longest_wait(work: Callable[[], Any]) -> float:
    """The longest time in seconds for which this thread had not the interpreter while another one worked; at most what
    this process computed meanwhile, for what other processes take of the cores is no wait of ours."""
    worker = threading.Thread(target=work)
    worker.start()
    longest, last = 0.0, _clocks()
    while worker.is_alive():
        time.sleep(0.001)
        now = _clocks()
        longest, last = max(longest, min(now[0] - last[0], now[1] - last[1])), now
    worker.join()
    return longest


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _work(clock: Callable[[], float]) -> float:
    begin = clock()
    total = 0
    for number in range(200_000):
        total += number & 7
    assert total == 700_000
    return clock() - begin
