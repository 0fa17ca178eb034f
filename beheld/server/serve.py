"""Runs the application: sockets, signals, and the drain before the end."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from beheld.api.async_llm import AsyncLLM
from beheld.server import tls
from beheld.server.app import Service
from beheld.server.health import EarlyHealth
from beheld.server.http_protocol import DeadlineProtocol
from beheld.server.listen import ACCEPTED_IN_TURN, address, leave
from beheld.server.options import ServerOptions
from beheld.server.root_path import RootPath
from beheld.utils.gil import quick_turns
from beheld.utils.log import get_logger
from beheld.utils.loop_share import LoopShare

logger = get_logger(__name__)

# How long a server reports a dead engine before it ends.
DEAD_S = 5.0
# Descriptors that the server requests; each connection needs one.
_DESCRIPTORS = 65_536
# Seconds between two log lines about the same system error.
_SILENCE_S = 60.0
# Seconds between two calls of on_tick, as in uvicorn.
_TICK_S = 0.1


class Server(uvicorn.Server):
    """uvicorn's server; on the first signal it stops accepting requests and ends after the running ones."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self._admission = service.admission
        self._metrics = service.metrics
        self._drain_s = drain_s
        self._llm = service.llm
        self._health = service.engine_health
        self._loras = service.options.loras
        self._ticked: float | None = None
        self._dead_since: float | None = None
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(LoopErrors())
        for lora in self._loras:
            # Reports a broken adapter now, not at its first request.
            await self._llm.add_lora(lora)
        self._health.watch()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Runs every tenth of a second; ends the server soon after the engine, so that a supervisor can act.

        The delay of a tick is the delay that every client sees.
        """
        now = time.monotonic()
        if self._ticked is not None:
            self._metrics.lagged(max(0.0, now - self._ticked - _TICK_S))
        self._ticked = now
        if not self._llm.alive:
            if self._dead_since is None:
                self._dead_since = time.monotonic()
                logger.error("%s The server reports this for %g s, then ends with status 3.", self._llm.reason, DEAD_S)
            if time.monotonic() - self._dead_since > DEAD_S:
                self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end at once. Third: end without notifying clients."""
        if self._loop is None or self._admission.cut:
            self.should_exit = self.force_exit = True
        elif self._admission.draining:
            self._loop.call_soon_threadsafe(self._cut_off)
        else:
            self._admission.draining = True
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        logger.info("Shutting down after %d running answers, within %g s at most.", self._admission.busy, self._drain_s)
        self._drain = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await self._admission.idle()
        except TimeoutError:
            self._cut_off()
        self.should_exit = True

    def _cut_off(self) -> None:
        logger.warning("%d answers are cut off.", self._admission.busy)
        self._admission.cut_off()
        self.should_exit = True


def make(llm: AsyncLLM, options: ServerOptions) -> tuple[Server, Starlette]:
    """The server and its application, not running yet."""
    service = Service(llm, options)
    app = service.app()
    attributes = {
        "header_s": options.header_s,
        "send_s": options.send_s,
        "request_log": service.access_log,
        "turns": LoopShare(),
        "places": service.admission.connections,
        "peer_of": staticmethod(service.clients.peer_of),
    }
    protocol = type("Protocol", (DeadlineProtocol,), attributes)
    config = uvicorn.Config(
        RootPath(EarlyHealth(app, service.engine_health, service.access_log, service.seen), options.root_path),
        **tls.settings(options),
        http=protocol,
        ws="none",
        lifespan="off",
        backlog=ACCEPTED_IN_TURN,
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=bool(options.forwarded_allow_ips),
        forwarded_allow_ips=list(options.forwarded_allow_ips),
        timeout_keep_alive=int(options.keep_alive_s),
        timeout_graceful_shutdown=1,
    )
    return Server(config, service, options.drain_s), app


def run(llm: AsyncLLM, options: ServerOptions, listener: socket.socket) -> None:
    """Serve until a signal; returns after the drain.

    Threads that read bodies and prompts compute while the event loop runs, which takes the interpreter lock again after
    each system call: with the usual switch interval two such threads let a request for /health wait 340 ms.
    """
    _raise_descriptors()
    server, _ = make(llm, options)
    logger.info("Serving %s at %s (page at /, API at /v1)", options.names[0], address(listener, options))
    try:
        with quick_turns():
            server.run(sockets=[listener])
    finally:
        leave(listener)


class LoopErrors:
    """Logs errors of the event loop itself.

    System errors (no descriptors left, a client's reset) may occur every second, so each kind is logged once a minute.
    """

    def __init__(self) -> None:
        self._next_log: dict[tuple[object, ...], float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio's exception handler."""
        error, message = context.get("exception"), context.get("message")
        if not isinstance(error, OSError):
            logger.error("In the event loop: %s (%s)", message, type(error).__name__, exc_info=error)
            return
        kind, now = (type(error), error.errno, message), time.monotonic()
        if now >= self._next_log.get(kind, now):
            self._next_log[kind] = now + _SILENCE_S
            logger.error("In the event loop: %s (%s)", message, error.strerror or type(error).__name__)


def _raise_descriptors() -> None:
    """Raise the descriptor limit: shells often allow 1024, fewer than the connections that the options allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
