"""Turns at Python's interpreter lock for threads that prepare requests, so that the engine's thread gets its share."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

# Launching a step on a device makes hundreds of calls, each of which gives the interpreter away and wants it back; by
# default a thread that computes keeps it for 5 ms. On an H200, 256 new images: 105 requests/s against 100.
_SECONDS = 0.0002


# Threads that prepare and are at work in the interpreter at a time. On an H200 with six such threads, known images,
# 7B: 181 requests/s with two, 169 with all, 174 with one.
_MOST_AT_WORK = 2


class _ThreadTurn(threading.local):
    """Of a thread: whether it takes turns, and whether it has one."""

    counted = False
    held = False


_mine = _ThreadTurn()
_free: SimpleQueue[None] = SimpleQueue()


def _begin() -> None:
    """No turn is taken."""
    global _free
    _free = SimpleQueue()
    for _ in range(_MOST_AT_WORK):
        _free.put(None)


_begin()
# A process that was forked has none of the threads that have turns.
os.register_at_fork(after_in_child=_begin)


def take_turns() -> None:
    """Let the calling thread take turns from now on; the initializer of a pool of threads.

    Not for a main thread: an interrupt between any two instructions could lose a turn for good.
    """
    _mine.counted = True


@contextmanager
def in_turn() -> Iterator[None]:
    """Of all threads that take turns, few are within such a block at a time; other threads pass.

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
    """Give up the thread's turn within the block, which waits for something or needs no interpreter."""
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
    """Let the interpreter pass from thread to thread more quickly within the block, in the whole process."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
