"""A call at the end of this process, for what a script has left open."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable


class ExitHook:
    """Calls a function when the interpreter ends, before the calls that were registered earlier.

    A process that was forked from this one does not call it.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._pid = call, os.getpid()
        atexit.register(self._run)

    def _run(self) -> None:
        if os.getpid() == self._pid:
            self._call()

    def cancel(self) -> None:
        """Do not call it."""
        atexit.unregister(self._run)
