"""The sandbox: it runs tasks on what strangers sent, in processes that can be killed without harm to anything else."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from beheld.core.errors import BeheldError, WorkerError
from beheld.sandbox.task_type import TaskType, WorkerFault
from beheld.sandbox.worker_group import WorkerGroup
from beheld.utils.cancellation import CancelToken
from beheld.utils.gil import out_of_turn
from beheld.utils.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
A = TypeVar("A")


class Sandbox:
    """All worker processes of one engine. Safe to use from several threads.

    Workers of a task type begin with its first task. A worker that crashes, or exceeds its time or its memory, costs
    one task.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[TaskType[Any, Any], WorkerGroup] = {}
        self._closed = False

    def run(self, kind: TaskType[T, A], task: T, cancel: CancelToken | None = None) -> A:
        """A worker's answer to `task`. If it is cancelled meanwhile, its worker is killed.

        Raises:
            WorkerError: workers cannot be started, or the sandbox was closed.
            BeheldError: what the work itself raised.
            Exception: what the task type makes of a fault of the worker.
            Cancelled: the result is no longer wanted.
        """
        try:
            with out_of_turn():
                answer = self._group(kind).run(task, cancel or CancelToken())
        except WorkerFault as fault:
            raise kind.error(task, fault) from fault
        if not isinstance(answer, kind.answer):
            raise WorkerError(f"A worker answered with a {type(answer).__name__}.")
        return answer

    def warm(self, kind: TaskType[Any, Any]) -> None:
        """Begin to load what workers need, without waiting for it; an error comes with the first task."""

        def begin() -> None:
            try:
                self._group(kind).load()
            except BeheldError as error:
                logger.warning("%s", error)

        threading.Thread(target=begin, name="beheld-workers", daemon=True).start()

    def pids(self, kind: TaskType[Any, Any] | None = None) -> tuple[int, ...]:
        """The numbers of the worker processes; of all task types if none is named."""
        with self._lock:
            groups = [group for known, group in self._groups.items() if kind in (None, known)]
        return tuple(number for group in groups for number in group.pids())

    def server_pid(self, kind: TaskType[Any, Any]) -> int | None:
        """The number of the process that forks workers of this type, if it runs."""
        group = self._groups.get(kind)
        return None if group is None else group.server_pid

    def close(self) -> None:
        """End all workers; tasks in work fail."""
        with self._lock:
            self._closed = True
            groups = list(self._groups.values())
        for group in groups:
            group.close()

    def _group(self, kind: TaskType[Any, Any]) -> WorkerGroup:
        with self._lock:
            if self._closed:
                raise WorkerError("The engine was closed.")
            if kind not in self._groups:
                self._groups[kind] = WorkerGroup(kind)
            return self._groups[kind]
