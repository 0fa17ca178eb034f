"""The standard streams, which may be closed when a command starts."""

from __future__ import annotations

import os
import sys


def ensure() -> None:
    """Open the null device in place of each standard stream that is closed, for this process and those it starts.

    Otherwise the next files and sockets take the streams' numbers: what a library prints goes to a client, and a new
    process takes a connection for its own stream.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number.
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def discard_output() -> None:
    """Let the null device take what standard output still holds, where writing it failed.

    Otherwise the interpreter's end tries again, and reports a second error.
    """
    opened = os.open(os.devnull, os.O_WRONLY)
    os.dup2(opened, sys.stdout.fileno())
    os.close(opened)
