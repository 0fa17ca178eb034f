"""Limits how many preparing threads use the interpreter lock at once, to leave the engine's thread its share."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue

# Launching a step makes hundreds of calls, and each releases the interpreter lock and takes it again. By default a
# computing thread keeps the lock for 5 ms. On an H200 with 256 new images: 105 requests/s against 100.
_SECONDS = 0.0002


# Preparing threads that use the interpreter at once. On an H200 with six such threads, known images, 7B: 181 requests/s
# with two, 169 with all, 174 with one.
_MOST_AT_WORK = 2


class _ThreadTurn(threading.local):
    """A thread's state: whether it takes turns, and whether it has one."""

    counted = False
    held = False


_mine = _ThreadTurn()
_FREELY = nullcontext()
_free: SimpleQueue[None] = SimpleQueue()


def _begin() -> None:
    """Reset the state: no thread has a turn."""
    global _free
    _free = SimpleQueue()
    for _ in range(_MOST_AT_WORK):
        _free.put(None)


_begin()
# A forked process has none of the threads that hold turns.
os.register_at_fork(after_in_child=_begin)


def take_turns() -> None:
    """Make the calling thread take turns from now on; the initializer of a thread pool.

    Do not use it in a main thread: an interrupt between two instructions could lose a turn for good.
    """
    _mine.counted = True


def in_turn() -> AbstractContextManager[None]:
    """Let only a few of the threads that take turns into the block at once; other threads pass freely.

    Each thread that waits for the interpreter slows the thread that drives the device.
    """
    return _FREELY if not _mine.counted or _mine.held else _turn()


@contextmanager
def _turn() -> Iterator[None]:
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
    """Give up the thread's turn inside the block, which waits or needs no interpreter."""
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
    """Shorten the interpreter's switch interval inside the block, for the whole process."""
    _quick.enter()
    try:
        yield
    finally:
        _quick.leave()


class _Quick:
    """The blocks that want quick turns, of all threads: the first shortens the interval, the last restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0.0

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SECONDS))

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._before)


_quick = _Quick()
