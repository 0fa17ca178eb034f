"""Delays Ctrl-C in blocks that it must not interrupt."""

from __future__ import annotations

import signal
import threading

# The functions of `signal` make enumerations of numbers and handlers, which takes 20 us a block.
from _signal import getsignal
from _signal import signal as set_handler
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; a second Ctrl-C interrupts at once.

    Python raises KeyboardInterrupt between any two instructions. In the middle of a change it would leave the counts of
    rows and blocks inconsistent. Custom handlers and other threads are not affected.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    asked = 0

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            signal.default_int_handler(number, frame)

    set_handler(signal.SIGINT, wait)
    try:
        yield
    finally:
        set_handler(signal.SIGINT, signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt
