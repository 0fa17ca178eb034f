"""The access log: every request has a name, one line in the log and one count, whatever became of it."""

from __future__ import annotations

import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beheld.server.errors import REQUEST
from beheld.server.metrics import Metrics
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The client went away; no status of HTTP says so.
GONE = 499
# Routes that are asked all the time and say nothing in the log; and what no route answered.
_QUIET = frozenset({"health", "show_metrics"})
NO_ROUTE = "none"


class AccessLog:
    """What is told of the end of each request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def ended(self, route: str, number: str, status: int, seconds: float) -> None:
        """A request has ended. `number` is the part that its names have in common: see `name_of`."""
        self._metrics.answered(route, status, seconds)
        if route not in _QUIET:
            logger.info("%s %s %d %.0f ms", name_of(number), route, status, 1e3 * seconds)


def number() -> str:
    """A new request's number."""
    return uuid.uuid4().hex


def name_of(number: str) -> str:
    """What X-Request-Id and the log call a request; the id in the answer's body ends with the same number."""
    return f"req-{number}"


class AccessLogMiddleware:
    """Writes a line for every request, also of those that no route sees.

    Handlers say through the request's state which `route` they are, and what the `outcome` was where that is not the
    status that was sent: a stream has a status before it has failed.
    """

    def __init__(self, app: ASGIApp, access_log: AccessLog) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; the answer gets an X-Request-Id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        state = scope["state"]
        state |= {"number": number(), "route": NO_ROUTE, "outcome": None, "streamed": False}
        REQUEST.set(name_of(state["number"]))
        status = GONE
        told = False

        def end() -> None:
            nonlocal told
            if not told:
                told = True
                self._access_log.ended(
                    state["route"], state["number"], state["outcome"] or status, time.monotonic() - begin
                )

        async def said(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = (b"x-request-id", name_of(state["number"]).encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            elif not message.get("more_body") and not state["streamed"]:
                # Before the last bytes: who has the answer finds it counted.
                end()
            await send(message)

        try:
            await self._app(scope, receive, said)
        finally:
            end()
