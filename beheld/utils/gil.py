"""Shares the interpreter lock between the thread that drives the device and those that prepare media."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

# Launching a step on a device makes hundreds of calls, each of which gives the interpreter away and wants it back; by
# default a thread that computes keeps it for 5 ms. On an H200, 256 new images: 105 requests/s against 100.
_SECONDS = 0.0002

# Threads that prepare media and may run Python at a time. On an H200 with six such threads, known images,
# 7B: 181 requests/s with two, 169 with all, 174 with one.
_MOST_AT_WORK = 2


class _Turns(threading.local):
    """Of a thread: whether it takes turns, and whether it has one."""

    counted = False
    held = False


_mine = _Turns()
_free: SimpleQueue[None] = SimpleQueue()


def _begin() -> None:
    """No turn is taken."""
    global _free
    _free = SimpleQueue()
    for _ in range(_MOST_AT_WORK):
        _free.put(None)


_begin()
# Threads that had a turn do not exist in a forked process.
os.register_at_fork(after_in_child=_begin)


def take_turns() -> None:
    """The calling thread takes turns from now on; threads of a pool call it as they start.

    The main thread must not: an interrupt between any two instructions could lose a turn for good.
    """
    _mine.counted = True


@contextmanager
def in_turn() -> Iterator[None]:
    """Few of the threads that take turns are within such a block at a time; other threads pass at once.

    Each thread that wants the interpreter slows the one that drives the device.
    """
    if not _mine.counted or _mine.held:
        yield
        return
    free = _free
    free.get()
    _mine.held = True
    try:
        yield
    finally:
        _mine.held = False
        free.put(None)


@contextmanager
def out_of_turn() -> Iterator[None]:
    """Within the block, which waits or does not need the interpreter, another thread has this thread's turn."""
    if not _mine.held:
        yield
        return
    free = _free
    _mine.held = False
    free.put(None)
    try:
        yield
    finally:
        free.get()
        _mine.held = True


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
