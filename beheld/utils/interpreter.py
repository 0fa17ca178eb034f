"""How quickly Python's threads take turns, and when Ctrl-C may come."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

# Launching a step on a device makes hundreds of calls, each of which gives the interpreter away and wants it back; by
# default a thread that computes keeps it for 5 ms. On an H200, 256 new pictures: 105 requests/s against 100.
_SECONDS = 0.0002


# Threads that prepare and are at work in the interpreter at a time; whoever drives a device is not counted. On an H200
# with six such threads, known pictures, 7B: 181 requests/s with two, 169 with all, 174 with one.
_MOST_AT_WORK = 2
_free: SimpleQueue[None] = SimpleQueue()
for _ in range(_MOST_AT_WORK):
    _free.put(None)


@contextmanager
def in_turn() -> Iterator[None]:
    """Of all blocks of the process so marked, few run at a time. Within one, nothing may wait for another.

    Each thread that wants the interpreter takes a share of it from the one that drives the device.
    """
    _free.get()
    try:
        yield
    finally:
        _free.put(None)


@contextmanager
def quick_turns() -> Iterator[None]:
    """Within the block, all threads of the process take quicker turns."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within the block, Ctrl-C waits for its end; a second one does not.

    Python raises KeyboardInterrupt between any two instructions, and what counts rows and blocks would not survive
    that in the midst of one of its changes. Handlers of one's own, and other threads, are left as they are.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    asked = 0

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt
