"""The access log: every request gets an id, one log line and one count."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beheld.server.errors import DIALECT, LOGGED, REQUEST, dialect_of
from beheld.server.metrics import Metrics
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The client disconnected; HTTP has no status for it.
GONE = 499
# Routes that are polled and not logged.
_QUIET = frozenset({"health", "show_metrics"})
NO_ROUTE = "none"
# Names of clients that are taken: visible ASCII, so that no line of the log can be forged.
_NAME = re.compile(rb"[!-~]{1,128}")


@dataclass(frozen=True)
class RequestName:
    """What a request is called.

    Attributes:
        number: the end of the id in the response body.
        shown: X-Request-Id.
        logged: the beginning of its line in the log.
    """

    number: str
    shown: str
    logged: str


class AccessLog:
    """Logs and counts the end of each request.

    Args:
        takes_names: the X-Request-Id of a request is that of its answer.
    """

    def __init__(self, metrics: Metrics, *, takes_names: bool = False) -> None:
        self._metrics = metrics
        self._takes_names = takes_names

    def named(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> RequestName:
        """Name a new request that has these headers."""
        number = uuid.uuid4().hex
        own = f"req-{number}"
        if not self._takes_names:
            return RequestName(number, own, own)
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        if not _NAME.fullmatch(given):
            return RequestName(number, number, own)
        return RequestName(number, given.decode(), f"{own} ({given.decode()})")

    def ended(self, route: str, name: RequestName, status: int, seconds: float) -> None:
        """Record the end of a request."""
        self._metrics.answered(route, status, seconds)
        if route not in _QUIET:
            logger.info("%s %s %d %.0f ms", name.logged, route, status, 1e3 * seconds)


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
        own = self._access_log.named(scope["headers"])
        state |= {"number": own.number, "route": NO_ROUTE, "outcome": None, "streamed": False}
        REQUEST.set(own.shown)
        LOGGED.set(own.logged)
        DIALECT.set(dialect_of(scope["path"]))
        status = GONE
        logged = False

        def end() -> None:
            nonlocal logged
            if not logged:
                logged = True
                self._access_log.ended(state["route"], own, state["outcome"] or status, time.monotonic() - begin)

        async def send_logged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = (b"x-request-id", own.shown.encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            elif not message.get("more_body") and not state["streamed"]:
                # Before the last bytes, so that a client that has the response finds it counted.
                end()
            await send(message)

        try:
            await self._app(scope, receive, send_logged)
        finally:
            end()
