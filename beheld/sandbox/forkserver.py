"""The process that imports what workers need, once, and forks them; and the worker itself.

It has one thread, so that forking is safe, and does no work of its own. Workers share the imported libraries, so
starting one takes milliseconds. When the parent ends, the fork server ends too, and the kernel kills its workers.

    parent --- control --- fork server     "fork": a worker's id and socket; "end": kill it and report its exit code
    parent --- link ------ each worker     a task, its answer, the next task
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from beheld.core.errors import BeheldError, EngineError
from beheld.utils.allocator import keep_freed_memory
from beheld.utils.cpu_weight import lower_process, lower_session
from beheld.wire.codec import Codec
from beheld.wire.link import FrameError, Link, pair

FORK, END = b"f", b"e"
NUMBER = struct.Struct("<i")
# The first element of an answer.
DONE, FAILED, NO_MEMORY = "done", "failed", "no memory"
_SET_DEATH_SIGNAL = 1
# Freed memory that a worker keeps. With more, one large item each would make many workers hold much memory.
_MOST_KEPT_BYTES = 64 << 20

Work = Callable[[Any], Any]


def main(descriptor: int, name: str, libraries: Sequence[str]) -> None:
    """Import what a task type's workers need, report the outcome, and fork workers until the parent ends.

    Args:
        descriptor: the socket to the parent.
        name: the task type's name.
        libraries: modules to import before the settings arrive; see TaskType.
    """
    control = socket.socket(fileno=descriptor)
    # Loaded once for all workers: a C library's handle survives a fork.
    libc = ctypes.CDLL(None, use_errno=True)
    module, _, function = name.partition(":")
    tasks = importlib.import_module(module)
    for library in libraries:
        # What the work needs and lacks, it reports itself.
        with contextlib.suppress(Exception):
            importlib.import_module(library)
    link = Link(control, tasks.CODEC)
    try:
        memory_bytes, settings = link.receive()
    except EOFError:
        return
    try:
        work = getattr(tasks, function)(settings)
    except Exception as error:
        link.send((FAILED, _sendable(error)))
        return
    link.send((DONE, None))
    # A processor makes several arrays of an item's size, one after another; otherwise the kernel would map each page by
    # page.
    keep_freed_memory(_MOST_KEPT_BYTES)
    # Imported objects are permanent, and a collection would only copy their pages.
    gc.collect()
    gc.freeze()
    control.settimeout(None)
    lowered = False
    while command := control.recv(len(END) + NUMBER.size):
        if command == FORK:
            # Not before: while it loads, a start waits for it.
            lowered = lowered or lower_session()
            _fork(control, tasks.CODEC, work, memory_bytes, libc)
        elif command.startswith(END):
            (number,) = NUMBER.unpack(command.removeprefix(END))
            os.kill(number, signal.SIGKILL)
            _, status = os.waitpid(number, 0)
            control.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _fork(control: socket.socket, codec: Codec, work: Work, memory_bytes: int, libc: Any) -> None:
    ours, theirs = pair()
    parent = os.getpid()
    with warnings.catch_warnings():
        # The warning is about a library's threads, not Python's; they hold no lock that a worker needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        number = os.fork()
    if number == 0:
        code = 1
        try:
            control.close()
            ours.close()
            if sys.platform == "linux":
                libc.prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
            # If the parent had ended before prctl, no signal would arrive.
            if os.getppid() == parent:
                lower_process()
                _bound(memory_bytes)
                _serve(Link(theirs, codec), work)
                code = 0
        finally:
            os._exit(code)
    theirs.close()
    with ours:
        socket.send_fds(control, [NUMBER.pack(number)], [ours.fileno()])


def _bound(memory_bytes: int) -> None:
    """Limit this process to `memory_bytes` of mappings beyond its present ones."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limit = mapped + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(link: Link, work: Work) -> None:
    """Answer tasks until the other side ends."""
    while True:
        try:
            task = link.receive()
            answer = (DONE, work(task))
        except EOFError:
            return
        except MemoryError:
            answer = (NO_MEMORY, None)
        except FrameError as error:
            answer = (NO_MEMORY, None) if isinstance(error.__cause__, MemoryError) else (FAILED, _sendable(error))
        except Exception as error:
            answer = (FAILED, _sendable(error))
        try:
            link.send(answer)
        except MemoryError:
            link.send((NO_MEMORY, None))
        except OSError:
            return


def _sendable(error: Exception) -> BeheldError:
    if isinstance(error, BeheldError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    sys.stderr.flush()
    # An exit of the interpreter takes seconds to unload libraries, some of which complain of what is frozen.
    os._exit(code)
