"""Ctrl-C: blocks that it does not interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
