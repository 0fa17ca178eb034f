"""A port at which a job's metrics are read while it runs: GET /metrics, and GET / as Prometheus' own exporters have."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from beheld.server.app import Service
from beheld.server.hosts import HostGuard
from beheld.server.keys import KeyGuard
from beheld.server.listen import bound, is_own
from beheld.server.metrics import Metrics
from beheld.server.options import ServerOptions
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Bytes of a request's line and headers, seconds that one connection has and that the job's event loop has for an
# answer, and connections at a time.
_MAX_HEAD = 8 << 10
_CONNECTION_S, _ANSWER_S = 5.0, 4.0
_MAX_CONNECTIONS = 16


class _OneRequest(H11Protocol):
    """uvicorn's protocol, with a limit to the number of connections, and a time limit for all of one."""

    def connection_made(self, transport: Any) -> None:
        """As uvicorn's; ends after the time, or at once."""
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(_CONNECTION_S, transport.abort)


class MetricsPort:
    """Answers from before the model is loaded until the job's end, in a thread of its own, one request a connection.

    Until the job begins, counters are 0.

    Args:
        options: those of the server: the address, the keys and the model's names.

    Raises:
        ConfigError: the address is not available.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._listener = bound(options.host, options.port)
        if not options.api_keys and not is_own(self._listener.getsockname()[0]):
            logger.warning("Anyone who reaches %s can read this job's metrics.", options.host)
        self._early: Metrics | None = Metrics(options.names[0])
        self._job: tuple[Service, asyncio.AbstractEventLoop] | None = None
        app = Starlette(
            routes=[Route(path, self._show, methods=["GET"]) for path in ("/", "/metrics")],
            middleware=[Middleware(HostGuard, options=options), Middleware(KeyGuard, keys=options.api_keys)],
        )
        app.router.redirect_slashes = False
        config = uvicorn.Config(
            app,
            http=_OneRequest,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=0,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=_MAX_HEAD,
        )
        self._server = uvicorn.Server(config)
        # Connections wait in the listener until the thread takes them.
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The number of the port."""
        return int(self._listener.getsockname()[1])

    def begin(self, service: Service) -> None:
        """Show a job's figures from now on; called in its event loop."""
        self._job, self._early = (service, asyncio.get_running_loop()), None

    def end(self) -> None:
        """The job's event loop is about to end: there are no more figures."""
        self._job = None

    def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    async def _show(self, request: Request) -> Response:
        early, job = self._early, self._job
        if early is not None:
            return Response(early.text(None, 0), media_type=Metrics.content_type)
        if job is None:
            return PlainTextResponse("The job is over.\n", 503)
        service, loop = job
        asked = service.metrics_text()
        try:
            async with asyncio.timeout(_ANSWER_S):
                text = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, loop))
        except (RuntimeError, TimeoutError):
            # Its event loop has ended, or does nothing for others.
            asked.close()
            return PlainTextResponse("The job is over, or busy.\n", 503)
        return Response(text, media_type=Metrics.content_type)
