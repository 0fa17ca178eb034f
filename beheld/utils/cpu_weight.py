"""Lets a server's own process have the cores before its workers do, where both want them."""

from __future__ import annotations

import os
from contextlib import suppress

# By the kernel's table, what has this nice value weighs a third of what has none.
NICE = 5
_GROUP = "/proc/self/autogroup"


def lower_process() -> None:
    """Lower the calling process's priority to NICE, if it is higher."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def lower_session(nice: int = NICE) -> bool:
    """Lower the priority of the calling process's session to `nice`, if it is higher and the process leads it.

    Outside of control groups, Linux divides the cores between sessions first (`kernel.sched_autogroup_enabled`), and
    the priorities of processes count only within one. So a session with one worker has as much as the whole server.

    Returns:
        False if the kernel does not accept a change now: ask again later.
    """
    if os.getsid(0) != os.getpid():
        return True
    try:
        with open(_GROUP, encoding="ascii") as file:
            # "/autogroup-25 nice 0"
            present = int(file.read().split()[-1])
        if present < nice:
            with open(_GROUP, "w", encoding="ascii") as file:
                file.write(str(nice))
    except BlockingIOError:
        # Without privileges, one such wish of the whole system in a tenth of a second.
        return False
    except (OSError, ValueError, IndexError):
        # There are no such groups, or they may not be changed.
        pass
    return True
