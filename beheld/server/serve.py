"""Runs the application: sockets, signals, and the drain before the end."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Coroutine
from functools import partial
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from beheld.api.async_llm import AsyncLLM
from beheld.server import tls
from beheld.server.acceptor import Acceptor, Uncounted, connected
from beheld.server.admission import Places
from beheld.server.app import Service
from beheld.server.health import EarlyHealth
from beheld.server.http_protocol import DeadlineProtocol
from beheld.server.listen import address, leave
from beheld.server.neighbours import NONE, Neighbours
from beheld.server.options import ServerOptions
from beheld.server.parse_turns import ParseTurns
from beheld.server.root_path import RootPath
from beheld.server.slowest import Slowest
from beheld.server.tls import Secure
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
# Connections of other fronts that may wait to be accepted.
_PRIVATE_QUEUE = 1024
# Seconds between two calls of on_tick, as in uvicorn.
_TICK_S = 0.1


class OtherFronts(Protocol):
    """The fronts that this one has started."""

    def signal(self) -> None:
        """Tell them of a signal; called by its handler."""

    @property
    def running(self) -> bool:
        """Whether one of them has not ended."""


class Server(uvicorn.Server):
    """uvicorn's server; on the first signal it stops accepting requests and ends after the running ones.

    Args:
        config: uvicorn's.
        service: the application's state.
        drain_s: how long running requests may take after a signal.
        others: the server's other fronts, if this one has started them.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, drain_s: float, others: OtherFronts | None = None
    ) -> None:
        super().__init__(config)
        self._others = others
        self._neighbours = service.neighbours
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
        self._counts = service.connection_counts
        self._peer_of = service.clients.peer_of
        self._header_s = service.options.header_s
        self._table = service.front_table
        self._watch = service.front_watch

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(LoopErrors())
        for lora in self._loras if self._neighbours.first else ():
            # Reports a broken adapter now, not at its first request.
            await self._llm.add_lora(lora)
        self._health.watch()
        await super().startup([])
        self.servers += await self._listen_to_all(sockets or [])

    async def _listen_to_all(self, listeners: list[socket.socket]) -> list[Any]:
        """Serve clients, and other fronts on a private socket, without TLS."""
        loop = asyncio.get_running_loop()
        tls = self.config.ssl
        secure = None if tls is None else Secure(tls, self._peer_of, self._header_s)
        own: Any = self.config.http_protocol_class
        kinds = (
            own,
            # What clients leave unread or unparsed does not hold up other fronts' requests.
            type(
                "PrivateProtocol",
                (own,),
                {
                    "private": True,
                    "places": Places(2 * self._admission.connections.most),
                    "buffers": Places(self._admission.buffers.most),
                    "parse_turns": ParseTurns(),
                },
            ),
        )
        public, private = (
            partial(kind, config=self.config, server_state=self.server_state, app_state={}, _loop=loop)
            for kind in kinds
        )

        def connect(accepted: socket.socket) -> Coroutine[None, None, None]:
            return connected(public, accepted, secure)

        made: list[Any] = []
        if self._neighbours.several:
            made.append(await loop.create_server(private, sock=self._neighbours.listen(), backlog=_PRIVATE_QUEUE))
        counts = self._counts or Uncounted()
        queued = own.turns.num_waiting
        return [*made, *(Acceptor(listener, connect, counts, self._peer_of, queued) for listener in listeners)]

    async def on_tick(self, counter: int) -> bool:
        """Runs every tenth of a second; ends the server soon after the engine, so that a supervisor can act.

        The delay of a tick is the delay that every client sees.
        """
        now = time.monotonic()
        if self._ticked is not None:
            self._metrics.lagged(max(0.0, now - self._ticked - _TICK_S))
        self._ticked = now
        if self._table is not None and self._watch is not None and self._counts is not None:
            self._table.beat()
            self._counts.tell()
            self._watch.look()
        if not self._llm.alive:
            if self._dead_since is None:
                self._dead_since = time.monotonic()
                if self._neighbours.first:
                    words = "%s The server reports this for %g s, then ends with status 3."
                    logger.error(words, self._llm.reason, DEAD_S)
            if time.monotonic() - self._dead_since > DEAD_S:
                self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end at once. Third: end without notifying clients."""
        if self._others is not None:
            self._others.signal()
        if self._loop is None or self._admission.cut:
            self.should_exit = self.force_exit = True
        elif self._admission.draining:
            self._loop.call_soon_threadsafe(self._cut_off)
        else:
            self._admission.draining = True
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        who = f"Front {self._neighbours.place.number}: shutting" if self._neighbours.several else "Shutting"
        words = "%s down after %d running answers, within %g s at most."
        logger.info(words, who, self._admission.busy, self._drain_s)
        self._drain = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await self._admission.idle()
                while self._others is not None and self._others.running:
                    # They need the engine, and may wait for what this front answers.
                    await asyncio.sleep(_TICK_S)
                await self._admission.idle()
        except TimeoutError:
            self._cut_off()
        self.should_exit = True

    def _cut_off(self) -> None:
        logger.warning("%d answers are cut off.", self._admission.busy)
        self._admission.cut_off()
        self.should_exit = True


def make(
    llm: AsyncLLM, options: ServerOptions, neighbours: Neighbours = NONE, others: OtherFronts | None = None
) -> tuple[Server, Starlette]:
    """The server and its application, not running yet; see `run`."""
    service = Service(llm, options, neighbours)
    app = service.app()
    attributes = {
        "header_s": options.header_s,
        "send_s": options.send_s,
        "request_log": service.access_log,
        "turns": LoopShare(),
        "parse_turns": ParseTurns(),
        "places": service.admission.connections,
        "buffers": service.admission.buffers,
        "unread": Slowest[DeadlineProtocol](),
        "peer_of": staticmethod(service.clients.peer_of),
    }
    early = EarlyHealth(app, service.engine_health, service.access_log, service.seen)
    protocol = type("Protocol", (DeadlineProtocol,), attributes)
    config = uvicorn.Config(
        RootPath(service.forwarding(early), options.root_path),
        **tls.settings(options),
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=bool(options.forwarded_allow_ips),
        forwarded_allow_ips=list(options.forwarded_allow_ips),
        timeout_keep_alive=int(options.keep_alive_s),
        timeout_graceful_shutdown=1,
    )
    return Server(config, service, options.drain_s, others), app


def run(
    llm: AsyncLLM,
    options: ServerOptions,
    listener: socket.socket,
    neighbours: Neighbours = NONE,
    others: OtherFronts | None = None,
) -> None:
    """Serve until a signal; returns after the drain.

    Args:
        llm: the model.
        options: those of the server, for all of its fronts together.
        listener: where clients connect; with several fronts, all accept from it.
        neighbours: which of the fronts this one is.
        others: the other fronts, if this one has started them.

    Threads that read bodies and prompts compute while the event loop runs, which takes the interpreter lock again after
    each system call: with the usual switch interval two such threads let a request for /health wait 340 ms.
    """
    _raise_descriptors()
    server, _ = make(llm, options, neighbours, others)
    if neighbours.first:
        logger.info("Serving %s at %s (page at /, API at /v1)", options.names[0], address(listener, options))
    try:
        with quick_turns():
            server.run(sockets=[listener])
    finally:
        if neighbours.first:
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
