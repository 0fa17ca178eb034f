"""How long work keeps the interpreter lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def longest_wait(work: Callable[[], object]) -> float:
    """Seconds that another thread had to wait for the interpreter at most, the least of three times."""

    def once() -> float:
        ended, waits = threading.Event(), [0.0]

        def watch() -> None:
            last = time.perf_counter()
            while not ended.wait(0.001):
                waits.append(time.perf_counter() - last)
                last = time.perf_counter()
            waits.append(time.perf_counter() - last)

        watching = threading.Thread(target=watch)
        watching.start()
        work()
        ended.set()
        watching.join()
        return max(waits)

    return min(once() for _ in range(3))
