"""The workers of one task type; killing one affects only its task."""

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import BeheldError, UserError, WorkerError
from beheld.platform.probe import seeing_none
from beheld.sandbox.client_turns import ClientTurn, ClientTurns
from beheld.sandbox.forkserver import DONE, END, FAILED, FORK, NO_MEMORY, NUMBER
from beheld.sandbox.task_type import Fault, Load, TaskType, WorkerFault, codec_of, name_of
from beheld.utils import working_directory
from beheld.utils.cancellation import CancelToken
from beheld.wire.link import Link, pair

# A fork server only forks and reaps; if it takes longer than this, it is stopped or dead.
_CONTROL_S = 5.0
# The disk that holds the libraries may be slow.
_START_S = 120.0
# A worker computes with one thread and never on an accelerator.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    **seeing_none(),
}


@dataclass(eq=False)
class _Worker:
    number: int
    link: Link
    end: socket.socket
    server: ForkServer
    ended: str | None = None
    turn: ClientTurn | None = None

    def idle(self) -> bool:
        """True if it is alive and has sent nothing, as a worker without a task should."""
        readable, _, _ = select.select([self.end], [], [], 0.0)
        return not readable

    def hang_up(self) -> None:
        """Stop waiting for its answer; the worker is of no further use."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)


class ForkServer:
    """A fork server, as its parent sees it. It imports libraries from the start, and is usable once `settle` returns.
    Not thread-safe.

    Args:
        load, libraries: see TaskType.
    """

    def __init__(self, load: Load, libraries: Sequence[str] = ()) -> None:
        self._codec = codec_of(load)
        self.alive = True
        self._control, theirs = pair()
        with theirs:
            name = str(theirs.fileno())
            command = [sys.executable, "-m", "beheld.sandbox.forkserver", name, name_of(load), *libraries]
            # In its own session, a Ctrl-C at the terminal reaches only the front end, which drains.
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **_ENVIRONMENT},
                cwd=working_directory.existing(),
            )

    def settle(self, kind: TaskType[Any, Any]) -> None:
        """Send the settings and wait until the work is loaded.

        Raises:
            WorkerError: the server ended before it was ready.
            BeheldError: loading raised it.
        """
        try:
            link = Link(self._control, self._codec)
            link.send((kind.memory_bytes, kind.settings()))
            status, refusal = link.receive(_START_S)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise WorkerError("The processes that prepare requests cannot be started.", "The log says why.") from error
        except BaseException:
            self.close()
            raise
        if status != DONE:
            self.close()
            raise refusal

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fork(self) -> _Worker:
        """Fork a new worker.

        Raises:
            OSError: the server has ended or does not answer.
        """
        self._control.settimeout(_CONTROL_S)
        self._control.sendall(FORK)
        received, files, _, _ = socket.recv_fds(self._control, NUMBER.size, 1)
        if len(received) != NUMBER.size or len(files) != 1:
            for file in files:
                os.close(file)
            raise ConnectionError("the fork server has ended")
        end = socket.socket(fileno=files[0])
        return _Worker(NUMBER.unpack(received)[0], Link(end, self._codec), end, self)

    def end(self, worker: _Worker) -> str:
        """Kill a worker and return how it ended, in words.

        Raises:
            OSError: the server has ended or does not answer.
        """
        self._control.settimeout(_CONTROL_S)
        self._control.sendall(END + NUMBER.pack(worker.number))
        received = self._control.recv(NUMBER.size)
        if len(received) != NUMBER.size:
            raise ConnectionError("the fork server has ended")
        (code,) = NUMBER.unpack(received)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Kill the server; the kernel then kills its workers."""
        self.alive = False
        self._control.close()
        self._process.kill()
        self._process.wait()


class WorkerGroup:
    """The workers of one task type; they start with the first task. Thread-safe.

    Args:
        begun: a fork server of this type that was begun early.
    """

    def __init__(self, kind: TaskType[Any, Any], begun: ForkServer | None = None) -> None:
        self._kind = kind
        self._begun = begun
        self._turns = ClientTurns(kind.max_workers)
        self._lock = threading.Lock()
        self._idle: deque[_Worker] = deque()
        self._busy: set[_Worker] = set()
        self._closed = False
        # Held while the server is started or used; never while waiting for a worker.
        self._server_lock = threading.Lock()
        self._server: ForkServer | None = None
        # The error that loading the module raised; it would raise it again.
        self._refusal: UserError | None = None

    def run(self, task: Any, cancel: CancelToken, client: str = "") -> Any:
        """Run `task` in a worker and return its answer. Waiting for a free worker does not count as its time.

        Clients take turns at the workers.

        Raises:
            WorkerFault: the task exceeded its time or memory, or its process ended; only this task is lost.
            WorkerError: workers cannot be started.
            BeheldError: the work raised it.
            Cancelled: the task was cancelled; its worker is killed.
        """
        worker = self._take(cancel, client)
        try:
            with cancel.calling(worker.hang_up):
                status, answer = self._ask(worker, task)
        except BaseException:
            self._give_back(worker, fit=False)
            # If the task was cancelled, we killed the worker ourselves.
            cancel.check()
            raise
        # After running out of memory, it may hold memory that the next task needs.
        self._give_back(worker, fit=status != NO_MEMORY)
        if status == DONE:
            return answer
        if status == FAILED and isinstance(answer, BeheldError):
            raise answer
        raise WorkerFault(Fault.MEMORY)

    def load(self) -> None:
        """Load what workers need, unless it is loaded.

        Raises:
            WorkerError: workers cannot be started.
            BeheldError: loading raised it.
        """
        with self._server_lock:
            self._living()

    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        with self._lock:
            return tuple(worker.number for worker in (*self._idle, *self._busy))

    @property
    def server_pid(self) -> int | None:
        """Process id of the fork server, if it was started."""
        server = self._server
        return None if server is None else server.pid

    def close(self) -> None:
        """End all workers; running tasks fail."""
        with self._lock:
            self._closed = True
            self._idle.clear()
        self._turns.close()
        with self._server_lock:
            for server in (self._server, self._begun):
                if server is not None:
                    server.close()
            self._server = self._begun = None

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
            raise WorkerFault(Fault.ENDED, "a malformed answer") from error
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise WorkerFault(Fault.ENDED, "a malformed answer")
        return answer

    def _take(self, cancel: CancelToken, client: str) -> _Worker:
        turn = self._turns.take(client, cancel)
        try:
            worker = self._fit()
        except BaseException:
            self._turns.give_back(turn)
            raise
        worker.turn = turn
        with self._lock:
            self._busy.add(worker)
        return worker

    def _fit(self) -> _Worker:
        """An idle worker that is alive, or a new one."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return self._new()
            if worker.server.alive and worker.idle():
                return worker
            # It was killed while idle, so no task is lost.
            self._end(worker)

    def _new(self) -> _Worker:
        with self._server_lock:
            for _ in range(2):
                server = self._living()
                try:
                    return server.fork()
                except OSError:
                    # Its workers end with it; those with a task detect that themselves.
                    server.close()
            raise WorkerError("The processes that prepare requests cannot be started.", "The log says why.")

    def _living(self) -> ForkServer:
        if self._closed:
            raise WorkerError("The engine is closed.")
        if self._refusal is not None:
            raise self._refusal
        if self._server is None or not self._server.alive:
            server, self._begun = self._begun or ForkServer(self._kind.load, self._kind.libraries), None
            try:
                server.settle(self._kind)
            except UserError as error:
                self._refusal = error
                raise
            self._server = server
        return self._server

    def _give_back(self, worker: _Worker, *, fit: bool) -> None:
        turn, worker.turn = worker.turn, None
        assert turn is not None
        with self._lock:
            self._busy.discard(worker)
        # A worker beyond the usual number ends after its task.
        fit = fit and self._is_usual()
        if not fit:
            self._end(worker)
        with self._lock:
            if fit:
                self._idle.append(worker)
        self._turns.give_back(turn)

    def _is_usual(self) -> bool:
        with self._lock:
            return len(self._busy) + len(self._idle) < self._kind.max_workers

    def _end(self, worker: _Worker) -> str:
        """Make sure that a worker has ended and return how it ended."""
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
