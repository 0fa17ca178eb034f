"""The garbage collector beside a million objects that all stay: what importing torch and transformers leaves."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause cyclic garbage collection; what was made meanwhile then counts as old.

    Importing transformers takes a tenth to a fifth less time so. As young objects, all would be walked through three
    times by the first collections afterwards, 0.14 to 0.27 s each, in the middle of the first steps. Nested use,
    or use where collection is off anyway, changes nothing.
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


def count_as_old() -> None:
    """Leave what is there now to full collections, unless the program has set something aside itself."""
    if gc.get_freeze_count() == 0:
        # Both only join lists: from all generations to those set aside, from there to the oldest.
        gc.freeze()
        gc.unfreeze()


def set_aside() -> None:
    """Never again walk through what is there now.

    For a process that is the engine's or the server's alone, when it has started: in a user's own, what is in a cycle
    would stay for good when the user drops it. Until the process ends, since some extension modules complain about
    objects that were never collected.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
