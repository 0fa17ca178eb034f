"""Exempts the million permanent objects of torch and transformers from garbage collection."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from beheld.utils.interrupts import uninterrupted

T = TypeVar("T")

# How long no collection begins in `seldom_collected`.
_PAUSE_S = 0.25


class _Uncollected:
    """The thread whose block `uncollected` keeps collections off, and since when."""

    owner: int | None = None
    since = 0.0


_now = _Uncollected()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause cyclic garbage collection; objects made inside the block then count as old.

    This makes importing transformers 10 to 20 % faster. As young objects, the next three collections would walk them,
    0.14 to 0.27 s each, during the first steps. Inside another such block, or where collection is off, it changes
    nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        count_as_old()
        gc.enable()


_program_froze = False
"""Whether the program had frozen objects at some time. Counting them walks through all, which took nearly half of each
start in the run of all tests."""


def count_as_old() -> None:
    """Move all present objects to the oldest generation, unless the program itself has ever frozen some."""
    global _program_froze
    _program_froze = _program_froze or gc.get_freeze_count() > 0
    if not _program_froze:
        # Both calls only join lists: all generations to the frozen objects, and those to the oldest generation.
        gc.freeze()
        gc.unfreeze()


def set_aside() -> None:
    """Exclude the present objects from collection for good.

    Call it only in a process of the engine or the server, after its start: in a user's process, the cycles that the
    user drops would never be freed. The process undoes it at its end, because some extension modules complain about
    objects that were never collected.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


_uncollected = threading.Lock()


def _on_in_child() -> None:
    """In a process that was forked meanwhile, as by the caller's own code: the thread that would end its block may not
    exist there, and collections would never begin."""
    if _now.owner is None:
        return
    if _now.owner != threading.get_ident():
        _now.owner = None
        _uncollected.release()
    gc.enable()


os.register_at_fork(after_in_child=_on_in_child)


@contextmanager
def uncollected() -> Iterator[None]:
    """Begin no collection inside the block, for work that makes many objects and soon drops most of them.

    A collection begins with every few hundred objects that are made and not dropped, and about every hundredth goes
    through all, among them the long lists of all requests in work: it keeps the interpreter for up to a third of a
    second. What is dropped in cycles inside the block waits for its end, so the block must be brief: a body that is
    parsed, a step. Of several such blocks at a time only the first has this effect, so that collections begin again
    when it ends. Where another thread of the program turns collections off meanwhile, they are on after the block.
    """
    ours = False
    try:
        with uninterrupted():
            ours = gc.isenabled() and _uncollected.acquire(blocking=False)
            if ours:
                _now.owner, _now.since = threading.get_ident(), time.monotonic()
                gc.disable()
        yield
    finally:
        if ours:
            _now.owner = None
            # Ctrl-C may raise after either.
            try:
                gc.enable()
            finally:
                _uncollected.release()


@contextmanager
def collecting() -> Iterator[None]:
    """Let collections begin inside the block, which waits for others, though it stands in one of `uncollected`.

    They may take any time, and what they drop in cycles would be kept as long. In a block of another thread it changes
    nothing.
    """
    if _now.owner != threading.get_ident():
        yield
        return
    gc.enable()
    try:
        yield
    finally:
        gc.disable()


def collect_if_due() -> None:
    """Let a collection begin if this thread has kept them off for longer than it should, as between two items that
    are far from each other."""
    if _now.owner == threading.get_ident() and (now := time.monotonic()) >= _now.since + _PAUSE_S:
        with collecting():
            _now.since = now
            # A collection that is due begins when something is made.
            _Uncollected()


def seldom_collected(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items; a collection begins between two of them, at most every quarter of a second.

    For many items that are kept: each collection goes through all that were made since the last one, and each tenth
    once more, every number of a list included. Code that takes the items runs without collections as well, and so does
    what makes them, except where it calls `collect_if_due` or waits in a block of `collecting`.
    """
    with ExitStack() as pause:
        until = float("-inf")
        for item in items:
            if (now := time.monotonic()) >= until:
                pause.close()
                pause.enter_context(uncollected())
                until = now + _PAUSE_S
            yield item
