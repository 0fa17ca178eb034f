"""The access log: every request gets an id, one log line and one count."""

from __future__ import annotations

import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beheld.server.errors import DIALECT, REQUEST, dialect_of
from beheld.server.metrics import Metrics
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The client disconnected; HTTP has no status for it.
GONE = 499
# Routes that are polled and not logged.
_QUIET = frozenset({"health", "show_metrics"})
NO_ROUTE = "none"


class AccessLog:
    """Logs and counts the end of each request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def ended(self, route: str, number: str, status: int, seconds: float) -> None:
        """Record the end of a request. `number` is the common part of its names, see `name_of`."""
        self._metrics.answered(route, status, seconds)
        if route not in _QUIET:
            logger.info("%s %s %d %.0f ms", name_of(number), route, status, 1e3 * seconds)


def number() -> str:
    """A new request's number."""
    return uuid.uuid4().hex


def name_of(number: str) -> str:
    """The request's name in X-Request-Id and in the log; the id in the response body ends with the same number."""
    return f"req-{number}"


class AccessLogMiddleware:
    """Writes a log line for every request, including those that reach no route.

    Handlers set two attributes of the request's state: `route`, their name, and `outcome`, if the final status differs
    from the one that was sent. A stream sends its status before it can fail.
    """

    def __init__(self, app: ASGIApp, access_log: AccessLog) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application and add an X-Request-Id to the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        state = scope["state"]
        state |= {"number": number(), "route": NO_ROUTE, "outcome": None, "streamed": False}
        REQUEST.set(name_of(state["number"]))
        DIALECT.set(dialect_of(scope["path"]))
        status = GONE
        logged = False

        def end() -> None:
            nonlocal logged
            if not logged:
                logged = True
                self._access_log.ended(
                    state["route"], state["number"], state["outcome"] or status, time.monotonic() - begin
                )

        async def send_logged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = (b"x-request-id", name_of(state["number"]).encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            elif not message.get("more_body") and not state["streamed"]:
                # Before the last bytes, so that a client that has the response finds it counted.
                end()
            await send(message)

        try:
            await self._app(scope, receive, send_logged)
        finally:
            end()
