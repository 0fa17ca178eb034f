"""The further fronts of a server: how they are started, and how one that ends or hangs is started anew."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace

from beheld.api.front_place import FrontPlace
from beheld.cli.front import CODEC, FrontReady, FrontStart, without_plugins
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, ConfigError, EngineDeadError
from beheld.engine.messages import Decisions, Failed
from beheld.engine.process import Spawned, spawn
from beheld.engine.shared_engine import Connection, FrontRelay, SharedEngine
from beheld.server.front_table import FrontState, FrontTable, FrontWatch, make_table
from beheld.server.neighbours import Neighbours
from beheld.server.options import ServerOptions
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Seconds before the second attempt to start a front that ended soon after the one before, and at most.
_RESTART_S = 1.0
_MAX_RESTART_S = 60.0
# A front that lived so long is started anew at once.
_LONG_LIFE_S = 60.0
# How long a front may take to get ready once all is decided: on a slow disk its libraries alone take a minute.
_START_S = 300.0
# Seconds between two looks at the fronts' signs of life.
_LOOK_S = 0.25
# How long fronts have to end once this process has.
_END_S = 2.0
# The longest path of a Unix socket; Linux takes 107 bytes, others 103.
_MAX_SOCKET_PATH = 103


@dataclass(eq=False)
class _Front:
    """A front's process and the connection to it."""

    spawned: Spawned
    link: Connection
    restarts: int = 0
    # Deaths one soon after the other.
    short_lives: int = 0
    started: float = field(default_factory=time.monotonic)


class Fronts:
    """The processes of fronts 1 and further; this process is front 0. See server.serve.OtherFronts.

    They are started at once and load their libraries while the engine starts.

    Args:
        count: the number of all fronts, at least 2.
        args: the engine's options.
        options: the server's.
        listener: where clients connect.

    Attributes:
        neighbours: the place of this process.

    Raises:
        ConfigError: there is no folder for their sockets, or no memory for their table.
    """

    def __init__(self, count: int, args: EngineArgs, options: ServerOptions, listener: socket.socket) -> None:
        self._args = args
        self._options = options
        self._listener = listener
        try:
            self._folder = tempfile.mkdtemp(prefix="beheld-fronts-")
        except OSError as error:
            raise ConfigError(
                f"There is no folder for the sockets between fronts: {error.strerror or error}.",
                "Set TMPDIR to one that can be written, or leave --api-server-count out.",
                param="api_server_count",
            ) from error
        place = FrontPlace(0, count)
        try:
            self._file = io.FileIO(make_table(self._folder, count), "r+")
            self._table = FrontTable(self._file.fileno(), place)
        except OSError as error:
            self.remove_folder()
            raise ConfigError(
                f"There is no room for what fronts know of each other: {error.strerror or error}.",
                "Free some memory, or leave --api-server-count out.",
                param="api_server_count",
            ) from error
        self.neighbours = Neighbours(place, self._folder, self._file.fileno(), secrets.token_bytes(16))
        if len(os.fsencode(self.neighbours.path(count - 1))) > _MAX_SOCKET_PATH:
            self._file.close()
            self.remove_folder()
            raise ConfigError(
                f"The folder for the sockets between fronts has too long a path: {self._folder}.",
                f"Set TMPDIR to one of at most {_MAX_SOCKET_PATH - 30} bytes.",
                param="api_server_count",
            )
        self._warmed = False
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._fronts = {number: self._begun(number, 0) for number in range(1, count)}

    def warm(self, info: ModelInfo, config: EngineConfig) -> None:
        """Let them get ready as far as they can before the weights are loaded; see `join`."""
        self._warmed = True
        for front in self._fronts.values():
            with contextlib.suppress(OSError):
                front.link.send(Decisions(info, config))

    def join(self, engine: SharedEngine, info: ModelInfo, config: EngineConfig) -> None:
        """Wait until all are ready; from then on they serve.

        Args:
            engine: their engine.
            info: the model's facts.
            config: the engine's decisions.

        Raises:
            BeheldError: one could not start.
        """
        if not self._warmed:
            # The engine has decided and started in one.
            self.warm(info, config)
        self._engine, self._decisions = engine, Decisions(info, config)
        for front in self._fronts.values():
            with contextlib.suppress(OSError):
                front.link.send(self._decisions)
        for number, front in self._fronts.items():
            self._serve(number, front)
        thread = threading.Thread(target=self._watch, name="beheld-front-watch", daemon=True)
        self._threads.append(thread)
        thread.start()

    def signal(self) -> None:
        """Tell all of a signal: after the first they drain."""
        self._ending.set()
        for front in list(self._fronts.values()):
            _terminate(front)

    @property
    def running(self) -> bool:
        """Whether one has not ended."""
        return any(front.spawned.process.poll() is None for front in list(self._fronts.values()))

    def close(self) -> None:
        """End all."""
        self._ending.set()
        with self._lock:
            fronts = list(self._fronts.values())
        deadline = time.monotonic() + _END_S
        for front in fronts:
            _terminate(front)
        for front in fronts:
            try:
                front.spawned.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                front.spawned.process.kill()
                front.spawned.process.wait()
        for thread in self._threads:
            thread.join(_END_S)
        self._file.close()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder of their sockets."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begun(self, number: int, restarts: int) -> _Front:
        """Start a process and tell it what is known at once."""
        # As in this process: several threads of a small operation would only wait for the engine's cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        spawned = spawn(environment, "beheld.cli.front", (self._listener.fileno(), self._file.fileno()))
        place = FrontPlace(number, self.neighbours.place.count, restarts)
        front = _Front(spawned, spawned.link(CODEC), restarts)
        # A front that has ended at once is seen by who waits until it is ready.
        with contextlib.suppress(OSError):
            front.link.send(self._start_of(place))
        return front

    def _start_of(self, place: FrontPlace) -> FrontStart:
        options = self._options
        parsers = {"tool_parser": options.tool_parser, "reasoning_parser": options.reasoning_parser}
        return FrontStart(self._args, without_plugins(options), parsers, replace(self.neighbours, place=place))

    def _serve(self, number: int, front: _Front) -> None:
        """Wait until a front is ready, and connect it to the engine.

        Raises:
            BeheldError: it could not start.
        """
        try:
            answer = front.link.receive(_START_S)
        except TimeoutError as error:
            raise EngineDeadError(
                f"A front's process was not ready within {_START_S:g} s.", "Its log may say what it does."
            ) from error
        except (EOFError, OSError, ValueError) as error:
            raise EngineDeadError("A front's process ended before it was ready.", "Its log says why.") from error
        if isinstance(answer, Failed):
            raise answer.error
        assert isinstance(answer, FrontReady)
        self._table.expect(number)
        FrontRelay(self._engine, front.link, lambda: self._ended(number, front))

    def _watch(self) -> None:
        """End fronts whose event loops stand still; each is then started anew as one that has died.

        The connections that such a front has accepted wait for it, and others are kept waiting for a moment each
        because it seems to have few.
        """
        watch = FrontWatch(self._table)
        while not self._ending.wait(_LOOK_S) and self._engine.alive:
            watch.look()
            for number, front in list(self._fronts.items()):
                if watch.state(number) is not FrontState.SILENT:
                    continue
                self._table.leave(number)
                # One that has not served may still be loading.
                most_s = self._options.health_s if watch.served(number) else _START_S
                if watch.silence_s(number) > most_s and front.spawned.process.poll() is None:
                    words = "Front %d has given no sign of life for %g s, and is ended."
                    logger.error(words, number, most_s)
                    self._table.reset(number, front.restarts)
                    # It does not hear a signal that it could handle.
                    front.spawned.process.kill()

    def _ended(self, number: int, front: _Front) -> None:
        """A front has ended; called in a thread of its relay."""
        with self._lock:
            if self._ending.is_set() or not self._engine.alive:
                return
            thread = threading.Thread(target=self._replace, args=(number, front), name="beheld-restart", daemon=True)
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def _replace(self, number: int, front: _Front) -> None:
        """Start a front in place of one that ended, at growing intervals until one serves."""
        status = front.spawned.process.wait()
        self._table.reset(number, front.restarts)
        front.link.close()
        lived_s = time.monotonic() - front.started
        short_lives = 0 if lived_s > _LONG_LIFE_S else front.short_lives + 1
        wait_s = 0.0 if short_lives <= 1 else min(_RESTART_S * 2 ** (short_lives - 2), _MAX_RESTART_S)
        logger.error("Front %d has ended with status %d. Its requests are lost; it is started anew.", number, status)
        restarts = front.restarts
        while not self._ending.wait(wait_s) and self._engine.alive:
            restarts += 1
            try:
                self._succeed(number, restarts, short_lives)
            except (BeheldError, OSError) as error:
                if self._ending.is_set():
                    return
                wait_s = min(max(_RESTART_S, 2 * wait_s), _MAX_RESTART_S)
                logger.error("Front %d could not start (%s). The next attempt is in %g s.", number, error, wait_s)
                continue
            logger.info("Front %d serves again.", number)
            return

    def _succeed(self, number: int, restarts: int, short_lives: int) -> None:
        """Start a front anew, and wait until it serves.

        Raises:
            BeheldError, OSError: it could not start; no process is left.
        """
        with self._lock:
            front = self._begun(number, restarts)
            front.short_lives = short_lives
            self._fronts[number] = front
        self._table.reset(number, restarts)
        if self._ending.is_set():
            # The signal came to the one before.
            _terminate(front)
        try:
            for _ in range(2):
                front.link.send(self._decisions)
            self._serve(number, front)
        except BaseException:
            front.spawned.process.kill()
            front.spawned.process.wait()
            front.link.close()
            raise


def _terminate(front: _Front) -> None:
    # Not the id of another process, once it has ended and was waited for.
    if front.spawned.process.poll() is None:
        # `poll` does not know of the end while another thread waits for it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(front.spawned.process.pid, signal.SIGTERM)
