"""A process that is a copy of this one: it has all libraries that this one has imported, and shares their memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

_LOOK_S = 0.01
_STANDARD_STREAMS = 3
# The highest descriptor that is closed where the system does not list the open ones.
_MAX_FILE = 1 << 16


class ForkedProcess:
    """A child of this process, with the methods of Popen that an engine's front calls.

    Args:
        pid: its id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.RLock()

    def poll(self) -> int | None:
        """None while it runs, else its exit code: that of a signal is negative."""
        with self._lock:
            if self._code is None:
                try:
                    ended, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    # Something else in this process has waited for it.
                    self._code = 0
                else:
                    self._code = os.waitstatus_to_exitcode(status) if ended else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, after so many seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired("process", timeout or 0.0)
            time.sleep(_LOOK_S)
        return code

    def kill(self) -> None:
        """End it at once."""
        # Another thread that found the end in between would free the id.
        with self._lock:
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)


def can_fork() -> bool:
    """Whether a copy of this process works: another thread of Python may hold a lock that the copy needs."""
    return threading.active_count() == 1 and threading.current_thread() is threading.main_thread()


def fork(child: Callable[[int], None], file: int, name: str) -> ForkedProcess:
    """Start a copy of this process, in a session of its own; only where `can_fork`.

    Args:
        child: what it does, given the descriptor. The copy ends when it returns.
        file: the one descriptor that stays open in the copy, next to the standard streams.
        name: of up to 15 letters, by which lists of processes tell the copy from this one.
    """
    for stream in (sys.stdout, sys.stderr):
        # None or closed, where the parent was started without it.
        with suppress(AttributeError, ValueError, OSError):
            stream.flush()
    # Until the copy has left them, it would run the parent's handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        with warnings.catch_warnings():
            # The warning is about threads of libraries such as OpenBLAS, which ends and restarts its own around a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return ForkedProcess(pid)
    code = 1
    try:
        _detach(file)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Some sandboxes have a /proc that cannot be written.
        with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(name)
        child(file)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # What the parent has opened and registered is the parent's to close.
        os._exit(code)


def _detach(file: int) -> None:
    """Leave the parent's session, handlers of signals, and descriptors but this one."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        open_files = list(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        most = os.sysconf("SC_OPEN_MAX")
        os.closerange(_STANDARD_STREAMS, file)
        os.closerange(max(_STANDARD_STREAMS, file + 1), _MAX_FILE if most < 0 else min(most, _MAX_FILE))
        return
    for open_file in open_files:
        if open_file >= _STANDARD_STREAMS and open_file != file:
            try:
                os.close(open_file)
            except OSError:
                # The listing's own.
                continue
