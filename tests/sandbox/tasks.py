"""Work for a pool's tests: it does what its task says, sane or not."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from beheld.core.errors import ConfigError, DecodeError
from beheld.wire.codec import Codec

CODEC = Codec(())


def load(settings: Any) -> Callable[[Any], Any]:
    """The work; `settings` is a mapping."""
    if settings.get("refuse"):
        raise ConfigError("not like this")
    if settings.get("die"):
        os._exit(3)

    def work(task: Any) -> Any:
        what, value, _ = task
        return _ACTS[what](value)

    return work


def _spin(_: Any) -> None:
    while True:
        pass


def _eat(count: int) -> int:
    return sum(len(bytearray(16 << 20)) for _ in [bytearray(16 << 20) for _ in range(count)])


def _new_pages(count: int) -> int:
    """Pages that were mapped anew for four buffers of so many bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # Not of numpy's, which asks for pages of another size.
    buffers = [bytearray(b"1") * count for _ in range(4)]
    buffers.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _refuse(reason: str) -> None:
    raise DecodeError(reason, "Mend it.")


def _answer_nonsense(_: Any) -> None:
    for number in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                os.write(number, b"\xff" * 64)
        except OSError:
            continue


_ACTS: dict[str, Callable[[Any], Any]] = {
    "echo": lambda value: value,
    "pid": lambda _: os.getpid(),
    "imported": lambda name: name in sys.modules,
    "sleep": time.sleep,
    "spin": _spin,
    "eat": _eat,
    "pages": _new_pages,
    "refuse": _refuse,
    "divide": lambda value: 1 // value,
    "kill": lambda number: os.kill(os.getpid(), number),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": os._exit,
    "zeros": lambda count: np.zeros(count, np.uint8),
    "garbage": _answer_nonsense,
}
