"""The engine in its own process, connected by a pair of sockets; either side notices the end of the other."""

from __future__ import annotations

import importlib
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from beheld.cluster.remote import LEAVE_S, Placement, RemoteProcess
from beheld.cluster.remote import start as start_elsewhere
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, EngineDeadError
from beheld.core.media import MediaItem
from beheld.engine.codec import CODEC
from beheld.engine.crossing import send_reply, unread_frame
from beheld.engine.forked import ForkedProcess, can_fork, fork
from beheld.engine.linked_engine import LinkedEngine
from beheld.engine.messages import (
    Decisions,
    Failed,
    Message,
    Ready,
    Reply,
    Submit,
    Tokenizer,
    Tried,
    TryItems,
)
from beheld.engine.stats import EngineReport
from beheld.platform.probe import begin_driver
from beheld.utils import working_directory
from beheld.utils.gc_tuning import paused_collector, set_aside
from beheld.utils.log import get_logger
from beheld.utils.roomy_stack import roomy
from beheld.wire.codec import Codec
from beheld.wire.link import FrameError, Link, end_with, pair
from beheld.wire.stream_link import StreamLink

logger = get_logger(__name__)

# There is nothing to save, so a process that does not end in time is killed.
_CLOSE_S = 1.0
# The same for one that keeps keys and values in a folder.
_CLOSE_WITH_FOLDER_S = 35.0
# What lists of processes call an engine that is a copy of the server, whose command line it has.
_COPY = "beheld-engine"
# Shared memory files that are reused for features; beyond this many in transit, new memory is allocated.
_MAX_KEPT = 4

OnDecided = Callable[[ModelInfo, EngineConfig], None]


@dataclass(frozen=True)
class Spawned:
    """A process, of this host or another, that waits for its options, and this side's end of the sockets.

    Attributes:
        environment: the variables that it was started with; None for those of this process.
    """

    process: subprocess.Popen[bytes] | ForkedProcess | RemoteProcess
    end: socket.socket
    environment: Mapping[str, str] | None = None

    def link(self, codec: Codec = CODEC) -> Link | StreamLink:
        """Return the connection over the sockets."""
        if isinstance(self.process, RemoteProcess):
            return StreamLink(self.end, codec)
        return Link(self.end, codec, _MAX_KEPT)


def spawn(
    environment: Mapping[str, str] | None = None, module: str = "beheld.engine.process", files: Sequence[int] = ()
) -> Spawned:
    """Start a process, with these variables or this process's.

    Call it before this process imports the same libraries, so that both import at the same time.

    Args:
        module: its program; its arguments are the descriptor of its end of the sockets, and `files`.
        files: descriptors that it inherits.
    """
    ours, theirs = pair()
    with theirs:
        inherited = (theirs.fileno(), *files)
        command = [sys.executable, "-m", module, *map(str, inherited)]
        # In its own session, a Ctrl-C at the terminal reaches only the front end, which drains.
        return Spawned(
            subprocess.Popen(
                command,
                pass_fds=inherited,
                start_new_session=True,
                cwd=working_directory.existing(),
                env=environment,
            ),
            ours,
            environment,
        )


def fork_or_spawn() -> Spawned:
    """Start a process of an engine on the host's cores that has the libraries which this process has imported.

    Call it after this process has imported them, in a command, whose process nobody else uses. Never where there is an
    accelerator: the copy of a process that has begun its driver cannot use it.
    """
    if not can_fork():
        return spawn()
    ours, theirs = pair()
    with theirs:
        try:
            return Spawned(fork(main, theirs.fileno(), _COPY), ours)
        except OSError as error:
            # A system that counts all memory which the copy might write can refuse it, and not a new program.
            logger.debug("The engine's process is a new program: %s.", error)
    ours.close()
    return spawn()


class EngineProcess(LinkedEngine):
    """An engine in a new process; see messages.Engine for the meaning of its methods.

    Args:
        args: the user's options.
        spawned: the process, if it is already running.
        on_decided: is called with the model's facts and the engine's decisions before the weights are loaded;
            `max_model_len` may still shrink to fit.

    Attributes:
        info, config: the model's facts and the engine's decisions.

    Raises:
        ConfigError, ModelError, CapacityError: from setup.start on the engine's side.
        EngineDeadError: the process ended during its start.
    """

    _end_of_link = "its process has ended"

    def __init__(self, args: EngineArgs, spawned: Spawned | None = None, on_decided: OnDecided | None = None) -> None:
        begun = spawned or spawn()
        self._process = begun.process
        super().__init__(begun.link())
        self._tokenizer: Callable[[], Tokenizer] | None = None
        self._close_s = _CLOSE_S if args.kv_transfer_config is None else _CLOSE_WITH_FOLDER_S
        try:
            self._link.send(args)
            _load()
            answer = self._link.receive()
            if isinstance(answer, Decisions):
                if on_decided is not None:
                    on_decided(answer.info, answer.config)
                answer = self._link.receive()
        except (EOFError, OSError, FrameError) as error:
            self._end()
            raise _ended_early() from error
        except BaseException:
            self._end()
            raise
        if isinstance(answer, Failed):
            self._end()
            raise answer.error
        assert isinstance(answer, Ready)
        self.info: ModelInfo = answer.info
        self.config: EngineConfig = answer.config

    def use(self, tokenizer: Callable[[], Tokenizer], *, now: bool = False) -> None:
        """Set the function that gives the tokenizer; the first request with a grammar calls it.

        Args:
            now: call it at once, before `start`, so that no request waits for the engine to load it.

        Raises:
            EngineDeadError: the process has ended.
        """
        self._tokenizer = tokenizer
        if now:
            assert not self._threads, "the engine has started"
            try:
                self._send_tokenizer()
            except OSError as error:
                raise _ended_early() from error

    def try_items(self, items: Sequence[MediaItem]) -> None:
        """Run the towers for items on the other side; before `start`.

        Raises:
            ModelError, CapacityError: as Executor.try_items.
            EngineDeadError: the process has ended.
        """
        assert not self._threads, "the engine has started"
        try:
            self._link.send(TryItems(tuple(items)))
            answer = self._link.receive()
        except (EOFError, OSError, FrameError) as error:
            raise _ended_early() from error
        assert isinstance(answer, Tried)
        if answer.error is not None:
            raise answer.error

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def reports(self) -> tuple[EngineReport, ...]:
        """It is one engine: nothing."""
        return ()

    def close(self) -> None:
        """End the process; kill it if it does not end in time."""
        self._leave(_CLOSE_S)
        try:
            self._process.wait(self._close_s if self._threads else 0.0)
        except subprocess.TimeoutExpired:
            logger.warning("The engine's process did not end in time and was killed.")
        self._end()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _end(self) -> None:
        self._alive = False
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._link.close()

    def _before(self, message: Message) -> None:
        """Send the tokenizer before the first request with a grammar."""
        if self._tokenizer is None or not isinstance(message, Submit):
            return
        if any(request.grammar is not None for request in message.requests):
            self._send_tokenizer()

    def _send_tokenizer(self) -> None:
        assert self._tokenizer is not None
        self._link.send(self._tokenizer())
        self._tokenizer = None


def _ended_early() -> EngineDeadError:
    return EngineDeadError("The engine's process ended before it was ready.", "Its log says why.")


def _load() -> None:
    """Import what the input pipeline needs while the engine's side loads the model."""
    importlib.import_module("transformers.models.auto.tokenization_auto")


class _LinkInbox:
    """Messages of a link. A thread reads them while the engine computes; while the engine waits, it reads them itself.

    Passing the first message after a pause from one thread to another would delay it by a tenth of a millisecond.
    """

    def __init__(self, link: Link | StreamLink) -> None:
        self._link = link
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # The reading thread holds it from its look at the socket until the message is queued or returned.
        self._turn = threading.Lock()
        self._computing = threading.Event()
        self._computing.set()
        # One wakes the waiting engine; the other makes the thread leave the socket.
        self._news, self._pause = os.eventfd(0), os.eventfd(0)
        threading.Thread(target=self._listen, name="beheld-listen", daemon=True).start()

    def wait(self) -> Message:
        message = self.poll()
        if message is not None:
            return message
        self._computing.clear()
        os.eventfd_write(self._pause, 1)
        try:
            while True:
                # Check the queue first: the thread may just have read the message, and nothing else signals it.
                with self._turn:
                    message = self.poll()
                    if message is None:
                        message = self._read()
                if message is not None:
                    return message
                _wait_for(self._link, self._news)
        finally:
            self._computing.set()

    def poll(self) -> Message | None:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def put(self, message: Message) -> None:
        self._queue.put(message)
        os.eventfd_write(self._news, 1)

    def _listen(self) -> None:
        while True:
            self._computing.wait()
            _wait_for(self._link, self._pause)
            with self._turn:
                message = self._read() if self._computing.is_set() else None
                if message is not None:
                    self._queue.put(message)

    def _read(self) -> Message | None:
        """The next message; None if there is none, or if it is unreadable and has no label."""
        if not _readable([self._link.fileno()], timeout_ms=0):
            return None
        try:
            message: Message = self._link.receive()
        except FrameError as error:
            return unread_frame(error)
        except EOFError:
            # No one is left to answer to.
            os._exit(0)
        return message


def _wait_for(link: Link | StreamLink, event: int) -> None:
    """Wait until the link has data or the event is set; resets the event."""
    if event in _readable([link.fileno(), event], timeout_ms=None):
        os.eventfd_read(event)


def _readable(files: list[int], timeout_ms: int | None) -> list[int]:
    """The files that are readable or closed; None as the timeout waits until there is one."""
    waiting = select.poll()
    for file in files:
        waiting.register(file, select.POLLIN)
    return [file for file, _ in waiting.poll(timeout_ms)]


def spawn_elsewhere(asking: str, gpus_each: int) -> Spawned:
    """Start a process on a host of the Ray cluster that has room.

    Args:
        asking: the option that asks, for messages.
        gpus_each: GPUs of the engine; 0 for a core of a CPU.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no room.
        EngineDeadError: it ended before it was connected.
    """
    wanted = Placement(
        "beheld.engine.process:main_elsewhere",
        1,
        gpus_each,
        with_caller=False,
        asking=asking,
        param="data_parallel_backend",
    )
    group = start_elsewhere(wanted)
    return Spawned(group.processes[0], group.ends[0])


@roomy
def main(descriptor: int) -> None:
    """The engine's process: start the engine, serve it, end."""
    end = socket.socket(fileno=descriptor)
    end_with(end)
    _run(Link(end, CODEC))


def main_elsewhere(end: socket.socket, token: bytes) -> None:
    """Be the engine's process on another host; see `main`.

    Args:
        end: the connection to the front end.
        token: what both sides know; nothing else connects them.
    """
    end_with(end, LEAVE_S)
    _run(StreamLink(end, CODEC))


def _run(link: Link | StreamLink) -> None:
    from beheld.engine.loop import serve
    from beheld.engine.setup import preload, resolve_and_decide, start

    # The other side is still importing. A process that may use no device finds none.
    begin_driver(None)
    with paused_collector():
        preload()
    try:
        args = link.receive()
    except EOFError:
        # The other side has refused the options, and has said why.
        return
    try:
        with paused_collector():
            decided = resolve_and_decide(args)
        link.send(Decisions(decided.info, decided.config))
        setup = start(args, decided)
    except BeheldError as error:
        link.send(Failed(error))
        return
    set_aside()
    link.send(Ready(setup.info, setup.config))

    def reply(message: Reply) -> None:
        send_reply(message, link)

    try:
        serve(setup.core, _LinkInbox(link), reply)
    except OSError:
        logger.info("The other side has ended.")


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # There is nothing to save, and unloading the libraries takes longer than `close` waits.
    os._exit(0)
