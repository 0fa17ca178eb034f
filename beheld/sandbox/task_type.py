"""Task types: what a worker does, within which bounds, and which error the caller of a lost task gets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from beheld.sandbox.codec import Codec

T = TypeVar("T")
A = TypeVar("A")


class Fault(StrEnum):
    """What may happen to a worker: it exceeds its time, or its memory, or it ends."""

    TIME = "time"
    MEMORY = "memory"
    ENDED = "ended"


class WorkerFault(Exception):
    """A task that was not answered.

    Args:
        fault: why.
        how: of a worker that ended, in words ("signal SIGSEGV").
    """

    def __init__(self, fault: Fault, how: str = "") -> None:
        super().__init__(f"{fault} {how}".strip())
        self.fault = fault
        self.how = how


@dataclass(frozen=True, eq=False)
class TaskType(Generic[T, A]):
    """One kind of task. It is declared in the room that knows the work.

    Attributes:
        load: a module's function. Given the settings, it loads what workers need and gives the function that does a
            task. Its module has CODEC, which knows the classes of settings, tasks and answers.
        settings: gives the settings; called once, as the first worker begins.
        answer: the class of answers.
        timeout_s: a task's seconds, without those that it waits for a worker.
        memory_bytes: what a worker may take beyond what all workers of this type share.
        max_workers: processes at a time.
        error: what the caller of a lost task gets.
    """

    load: Callable[[Any], Callable[[T], A]]
    settings: Callable[[], Any]
    answer: type[A]
    timeout_s: Callable[[T], float]
    memory_bytes: int
    max_workers: int
    error: Callable[[T, WorkerFault], Exception]

    @property
    def name(self) -> str:
        """Where the work is found, as "module:function"."""
        return f"{self.load.__module__}:{self.load.__name__}"

    @property
    def codec(self) -> Codec:
        """Puts settings, tasks and answers on the wire."""
        codec: Codec = sys.modules[self.load.__module__].CODEC
        return codec
