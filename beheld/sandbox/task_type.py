"""Task types: what a worker does, within which limits, and the error for the caller of a lost task."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from beheld.wire.codec import Codec

T = TypeVar("T")
A = TypeVar("A")
# TaskType.load
Load = Callable[[Any], Callable[[Any], Any]]


class Fault(StrEnum):
    """A worker's fault: it exceeds its time or its memory, or its process ends."""

    TIME = "time"
    MEMORY = "memory"
    ENDED = "ended"


class WorkerFault(Exception):
    """A worker did not answer its task.

    Args:
        fault: the kind of fault.
        how: how the worker's process ended, in words ("signal SIGSEGV").
    """

    def __init__(self, fault: Fault, how: str = "") -> None:
        super().__init__(f"{fault} {how}".strip())
        self.fault = fault
        self.how = how


@dataclass(frozen=True, eq=False)
class TaskType(Generic[T, A]):
    """One kind of task, declared in the package that does the work.

    Attributes:
        load: a module's function. It takes the settings, loads what workers need and returns the function that does a
            task. Its module has CODEC, which includes the classes of settings, tasks and answers.
        settings: returns the settings; called once, when the first worker starts.
        answer: the class of answers.
        timeout_s: seconds for a task, without the wait for a free worker.
        memory_bytes: memory that a worker may use beyond what all workers of this type share.
        max_workers: the most processes at once; one more may run while tasks of other clients are long.
        error: makes the error for the caller of a lost task.
        libraries: modules that take long to import, which the fork server imports before it knows the settings. One
            that cannot be imported is left out.
    """

    load: Callable[[Any], Callable[[T], A]]
    settings: Callable[[], Any]
    answer: type[A]
    timeout_s: Callable[[T], float]
    memory_bytes: int
    max_workers: int
    error: Callable[[T, WorkerFault], Exception]
    libraries: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The module and function of the work, as "module:function"."""
        return name_of(self.load)

    @property
    def codec(self) -> Codec:
        """Serializes settings, tasks and answers."""
        return codec_of(self.load)


def name_of(load: Load) -> str:
    """The module and function, as "module:function"."""
    return f"{load.__module__}:{load.__name__}"


def codec_of(load: Load) -> Codec:
    """The function's module's CODEC."""
    codec: Codec = sys.modules[load.__module__].CODEC
    return codec
