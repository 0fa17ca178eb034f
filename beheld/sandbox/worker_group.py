"""The workers of one task type, each of which can be killed without harm to anything but its task."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import BeheldError, UserError, WorkerError
from beheld.sandbox.forkserver import DONE, END, FAILED, FORK, NO_MEMORY, NUMBER
from beheld.sandbox.link import Link, pair
from beheld.sandbox.task_type import Fault, TaskType, WorkerFault
from beheld.utils.cancellation import CancelToken

# A fork server only forks and reaps: one that takes longer than this is stopped or gone.
_CONTROL_S = 5.0
# Libraries are read from a disk that may be slow.
_START_S = 120.0
# Workers compute with one thread each, and never on the GPU.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(eq=False)
class _Worker:
    number: int
    link: Link
    end: socket.socket
    server: _Server
    ended: str | None = None

    def idle(self) -> bool:
        """True if it lives and has nothing to say, as it should be while it has no task."""
        readable, _, _ = select.select([self.end], [], [], 0.0)
        return not readable

    def hang_up(self) -> None:
        """End every thread's waiting for its answer; it is of no further use."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)


class _Server:
    """A fork server, seen from its parent. Not thread-safe.

    Raises:
        WorkerError: it ends before it is ready.
        BeheldError: what its module said as it was loaded.
    """

    def __init__(self, kind: TaskType[Any, Any]) -> None:
        self._codec = kind.codec
        self.alive = True
        self._control, theirs = pair()
        with theirs:
            name = str(theirs.fileno())
            command = [sys.executable, "-m", "beheld.sandbox.forkserver", name, kind.name, str(kind.memory_bytes)]
            # A session of its own, so that a Ctrl-C at the terminal reaches only the side that drains.
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), start_new_session=True, env={**os.environ, **_ENVIRONMENT}
            )
        try:
            link = Link(self._control, self._codec)
            link.send(kind.settings())
            status, said = link.receive(_START_S)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise WorkerError("The processes that prepare requests cannot be started.", "The log says why.") from error
        except BaseException:
            self.close()
            raise
        if status != DONE:
            self.close()
            raise said

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def fork(self) -> _Worker:
        """A new worker.

        Raises:
            OSError: the server is gone, or does not answer.
        """
        self._control.settimeout(_CONTROL_S)
        self._control.sendall(FORK)
        said, files, _, _ = socket.recv_fds(self._control, NUMBER.size, 1)
        if len(said) != NUMBER.size or len(files) != 1:
            for file in files:
                os.close(file)
            raise ConnectionError("the fork server has ended")
        end = socket.socket(fileno=files[0])
        return _Worker(NUMBER.unpack(said)[0], Link(end, self._codec), end, self)

    def end(self, worker: _Worker) -> str:
        """Kill a worker; how it had ended, in words.

        Raises:
            OSError: the server is gone, or does not answer.
        """
        self._control.settimeout(_CONTROL_S)
        self._control.sendall(END + NUMBER.pack(worker.number))
        said = self._control.recv(NUMBER.size)
        if len(said) != NUMBER.size:
            raise ConnectionError("the fork server has ended")
        (code,) = NUMBER.unpack(said)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End it, and with it, by the kernel, its workers."""
        self.alive = False
        self._control.close()
        self._process.kill()
        self._process.wait()


class WorkerGroup:
    """The workers of one task type, which begin with the first task. Safe to use from several threads."""

    def __init__(self, kind: TaskType[Any, Any]) -> None:
        assert kind.max_workers > 0
        self._kind = kind
        self._changed = threading.Condition()
        self._idle: deque[_Worker] = deque()
        self._busy: set[_Worker] = set()
        self._taken = 0
        self._closed = False
        # Held while the server is begun or spoken to; never together with waiting for a worker.
        self._server_lock = threading.Lock()
        self._server: _Server | None = None
        # What the module said as it was loaded, which it would say again.
        self._refusal: UserError | None = None

    def run(self, task: Any, cancel: CancelToken) -> Any:
        """A worker's answer to `task`. Waiting for a free worker does not count as its time.

        Raises:
            WorkerFault: it took too long or too much, or its process ended; only this task is lost.
            WorkerError: workers cannot be started.
            BeheldError: what the work itself raised.
            Cancelled: the task was cancelled; a worker that was at it is killed.
        """
        worker = self._take(cancel)
        try:
            with cancel.calling(worker.hang_up):
                status, answer = self._ask(worker, task)
        except BaseException:
            self._give_back(worker, fit=False)
            # Then its end was our doing.
            cancel.check()
            raise
        # One that ran out of memory may hold more of it than the next task leaves over.
        self._give_back(worker, fit=status != NO_MEMORY)
        if status == DONE:
            return answer
        if status == FAILED and isinstance(answer, BeheldError):
            raise answer
        raise WorkerFault(Fault.MEMORY)

    def load(self) -> None:
        """Load what workers need, if that was not done before.

        Raises:
            WorkerError: workers cannot be started.
            BeheldError: what loading raised.
        """
        with self._server_lock:
            self._living()

    def pids(self) -> tuple[int, ...]:
        """The numbers of the worker processes."""
        with self._changed:
            return tuple(worker.number for worker in (*self._idle, *self._busy))

    @property
    def server_pid(self) -> int | None:
        """The number of the fork server, if it was begun."""
        server = self._server
        return None if server is None else server.pid

    def close(self) -> None:
        """End all workers; tasks that are being worked on fail."""
        with self._changed:
            self._closed = True
            self._idle.clear()
            self._changed.notify_all()
        with self._server_lock:
            if self._server is not None:
                self._server.close()
                self._server = None

    # ------------------------------------------------------------------ one task

    def _ask(self, worker: _Worker, task: Any) -> tuple[Any, Any]:
        timeout_s = self._kind.timeout_s(task)
        begun = time.monotonic()
        try:
            worker.link.send(task, timeout_s)
            answer = worker.link.receive(max(0.001, timeout_s - (time.monotonic() - begun)))
        except TimeoutError as error:
            raise WorkerFault(Fault.TIME) from error
        except (EOFError, OSError) as error:
            raise WorkerFault(Fault.ENDED, self._end(worker)) from error
        except ValueError as error:
            raise WorkerFault(Fault.ENDED, "an answer that makes no sense") from error
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise WorkerFault(Fault.ENDED, "an answer that makes no sense")
        return answer

    def _take(self, cancel: CancelToken) -> _Worker:
        with cancel.calling(self._wake), self._changed:
            while self._taken >= self._kind.max_workers and not self._closed:
                self._changed.wait()
                cancel.check()
            if self._closed:
                raise WorkerError("The engine was closed.")
            self._taken += 1
        try:
            worker = self._fit()
        except BaseException:
            with self._changed:
                self._taken -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._busy.add(worker)
        return worker

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fit(self) -> _Worker:
        """An idle worker that lives, or a new one."""
        while True:
            with self._changed:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return self._new()
            if worker.server.alive and worker.idle():
                return worker
            # It was killed while it had nothing to do: no task is lost.
            self._end(worker)

    def _new(self) -> _Worker:
        with self._server_lock:
            for _ in range(2):
                server = self._living()
                try:
                    return server.fork()
                except OSError:
                    # Its workers end with it; those that have a task see that for themselves.
                    server.close()
            raise WorkerError("The processes that prepare requests cannot be started.", "The log says why.")

    def _living(self) -> _Server:
        if self._closed:
            raise WorkerError("The engine was closed.")
        if self._refusal is not None:
            raise self._refusal
        if self._server is None or not self._server.alive:
            try:
                self._server = _Server(self._kind)
            except UserError as error:
                self._refusal = error
                raise
        return self._server

    def _give_back(self, worker: _Worker, *, fit: bool) -> None:
        with self._changed:
            self._busy.discard(worker)
        if not fit:
            self._end(worker)
        with self._changed:
            if fit:
                self._idle.append(worker)
            self._taken -= 1
            self._changed.notify()

    def _end(self, worker: _Worker) -> str:
        """Make sure that a worker is gone; how it had ended."""
        with self._server_lock:
            if worker.ended is not None:
                return worker.ended
            worker.link.close()
            worker.ended = "with the others"
            if worker.server.alive:
                try:
                    worker.ended = worker.server.end(worker)
                except OSError:
                    worker.server.close()
            return worker.ended
