"""A port at which a job's metrics are read while it runs: GET /metrics, and GET / as Prometheus' own exporters have."""

from __future__ import annotations

import asyncio
import threading
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message

from beheld.server.app import Service
from beheld.server.hosts import HostGuard
from beheld.server.keys import KeyGuard
from beheld.server.listen import bound, is_own
from beheld.server.metrics import Metrics
from beheld.server.options import ServerOptions
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Bytes of a request's line and headers, seconds that one connection has, and connections at a time.
_MAX_HEAD = 8 << 10
_CONNECTION_S = 5.0
_MAX_CONNECTIONS = 16


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
        self._open = 0
        self._app = Starlette(
            routes=[Route(path, self._show, methods=["GET"]) for path in ("/", "/metrics")],
            middleware=[Middleware(HostGuard, options=options), Middleware(KeyGuard, keys=options.api_keys)],
        )
        self._app.router.redirect_slashes = False
        begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(begun)), name="metrics", daemon=True)
        self._thread.start()
        begun.wait()

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
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()
        self._listener.close()

    async def _serve(self, begun: threading.Event) -> None:
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=_MAX_HEAD)
        begun.set()
        await self._closed.wait()
        server.close()

    async def _show(self, request: Request) -> Response:
        early, job = self._early, self._job
        if early is not None:
            return Response(early.text(None, 0), media_type=Metrics.content_type)
        if job is None:
            return PlainTextResponse("The job is over.\n", 503)
        service, loop = job
        text = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(service.metrics_text(), loop))
        return Response(text, media_type=Metrics.content_type)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._open += 1
        try:
            async with asyncio.timeout(_CONNECTION_S):
                writer.write(await self._answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._open -= 1

    async def _answer(self, head: bytes) -> bytes:
        """The whole answer to a request's line and headers."""
        line, *fields = head[:-4].split(b"\r\n")
        words = line.split(b" ")
        pairs = [(name.lower(), value.strip()) for name, colon, value in (field.partition(b":") for field in fields)]
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        path, _, query = words[1].partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": words[0].decode("latin-1"),
            "scheme": "http",
            "path": path.decode("latin-1"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": pairs,
            "client": None,
            "server": None,
            "state": {},
        }
        status, headers, parts = 500, list[tuple[bytes, bytes]](), list[bytes]()

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], message["headers"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        kept = [(name, value) for name, value in headers if name.lower() != b"connection"]
        shown = b"".join(b"%s: %s\r\n" % pair for pair in [*kept, (b"connection", b"close")])
        body = b"" if scope["method"] == "HEAD" else b"".join(parts)
        return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, HTTPStatus(status).phrase.encode(), shown, body)
