"""The sandbox: it runs tasks on untrusted input in processes that can be killed without harm to anything else."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from beheld.core.errors import BeheldError, WorkerError
from beheld.sandbox.task_type import Load, TaskType, WorkerFault
from beheld.sandbox.worker_group import ForkServer, WorkerGroup
from beheld.utils.cancellation import CancelToken
from beheld.utils.gil import out_of_turn
from beheld.utils.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")
A = TypeVar("A")


class Sandbox:
    """All worker processes of one engine. Thread-safe.

    A task type's workers start with its first task. A worker that crashes or exceeds its time or memory costs one task.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[TaskType[Any, Any], WorkerGroup] = {}
        self._begun: dict[Load, ForkServer] = {}
        self._closed = False

    def run(self, kind: TaskType[T, A], task: T, cancel: CancelToken | None = None, client: str = "") -> A:
        """Run `task` in a worker and return its answer. Cancelling kills the worker; clients take turns.

        Raises:
            WorkerError: workers cannot be started, or the sandbox is closed.
            BeheldError: the work raised it.
            Exception: the task type's error for a fault of the worker.
            Cancelled: the result is no longer wanted.
        """
        try:
            with out_of_turn():
                answer = self._group(kind).run(task, cancel or CancelToken(), client)
        except WorkerFault as fault:
            raise kind.error(task, fault) from fault
        if not isinstance(answer, kind.answer):
            raise WorkerError(f"A worker answered with a {type(answer).__name__}.")
        return answer

    def begin(self, load: Load, libraries: Sequence[str]) -> None:
        """Let the fork server of a task type import its libraries before the type is known.

        Args:
            load, libraries: of the type to come.
        """
        server = ForkServer(load, libraries)
        with self._lock:
            self._begun[load] = server

    def abandon(self, load: Load) -> None:
        """End a fork server that was begun for a type that does not come."""
        with self._lock:
            server = self._begun.pop(load, None)
        if server is not None:
            server.close()

    def warm(self, kind: TaskType[Any, Any]) -> None:
        """Start loading what workers need, without waiting; the first task reports an error."""

        def begin() -> None:
            try:
                self._group(kind).load()
            except BeheldError as error:
                logger.warning("%s", error)

        threading.Thread(target=begin, name="beheld-workers", daemon=True).start()

    def pids(self, kind: TaskType[Any, Any] | None = None) -> tuple[int, ...]:
        """Process ids of the workers, of one task type or of all."""
        with self._lock:
            groups = [group for known, group in self._groups.items() if kind in (None, known)]
        return tuple(number for group in groups for number in group.pids())

    def server_pid(self, kind: TaskType[Any, Any]) -> int | None:
        """Process id of the fork server of this task type, if it runs."""
        group = self._groups.get(kind)
        return None if group is None else group.server_pid

    def close(self) -> None:
        """End all workers; running tasks fail."""
        with self._lock:
            self._closed = True
            servers: list[WorkerGroup | ForkServer] = [*self._groups.values(), *self._begun.values()]
            self._begun.clear()
        for server in servers:
            server.close()

    def _group(self, kind: TaskType[Any, Any]) -> WorkerGroup:
        with self._lock:
            if self._closed:
                raise WorkerError("The engine is closed.")
            if kind not in self._groups:
                self._groups[kind] = WorkerGroup(kind, self._begun.pop(kind.load, None))
            return self._groups[kind]
