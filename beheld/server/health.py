"""Answers /health from the engine's and the fronts' last signs of life, without waiting for a step.

A task pings the engine every second. The engine answers between two steps, so an unanswered ping is as old as the step
that runs, or as the hang. /health reads that age, and takes a few hundred microseconds whatever the engine computes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from beheld.api.async_llm import AsyncLLM
from beheld.core.errors import EngineDeadError
from beheld.server.access_log import AccessLog
from beheld.server.admission import AdmissionControl
from beheld.server.errors import HttpError
from beheld.server.front_table import FrontWatch
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_PING_EVERY_S = 1.0
# Headers after which a request needs what guards and middlewares do: a body, or an answer for another site's page.
_NOT_PLAIN = frozenset({b"content-length", b"transfer-encoding", b"origin", b"upgrade", b"expect"})
_MAX_PLAIN_HEADERS = 32


class EngineHealth:
    """Whether the engine serves.

    Args:
        silence_s: the engine hangs if it does not answer a ping for so many seconds, unless it wakes up meanwhile.
        fronts: watches the server's fronts; None if there is one.
    """

    def __init__(
        self, llm: AsyncLLM, admission: AdmissionControl, silence_s: float, fronts: FrontWatch | None = None
    ) -> None:
        self._llm = llm
        self._admission = admission
        self._silence_s = silence_s
        self._fronts = fronts
        # When the ping that is not answered was sent.
        self._pinged: float | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin to ping the engine; called in the event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            self._pinged = time.monotonic()
            try:
                await self._llm.ping()
            except EngineDeadError:
                return
            except Exception as error:
                # The answer could not be read, but there was one.
                logger.warning("The engine's answer to a ping is lost: %s", error)
            self._pinged = None
            await asyncio.sleep(_PING_EVERY_S)

    def report(self) -> dict[str, object]:
        """The body of an answer.

        Raises:
            HttpError: 503, the server ends, or the engine or the first front hangs.
            EngineDeadError: the engine has died.
        """
        self.watch()
        if self._admission.draining:
            raise HttpError(503, "The server is shutting down.", "Try again after the restart.", code="draining")
        if not self._llm.alive:
            raise EngineDeadError(self._llm.reason, "Start it again.")
        if self._fronts is not None and self._fronts.silence_s(0) > self._silence_s:
            # The others are started anew; this one has the engine, whose answers it passes on.
            raise HttpError(
                503,
                "The server's first process does not answer.",
                "Try again; if this persists, the operator must restart the server.",
                code="front_hangs",
            )
        # It answers nothing while it reads its weights again.
        since = None if self._pinged is None else max(self._pinged, self._llm.waking_until)
        if since is not None and time.monotonic() - since > self._silence_s:
            raise HttpError(
                503,
                "The engine does not answer.",
                "Try again; if this persists, the operator must restart the server.",
                code="engine_hangs",
            )
        fronts = [] if self._fronts is None else self._fronts.reports()
        engines = [
            {"engine": each.engine, "state": each.state, "restarts": each.restarts, "requests": each.num_requests}
            for each in self._llm.engine_reports()
        ]
        more = {"engines": engines, "fronts": fronts}
        return {"status": "ok"} | {name: reports for name, reports in more.items() if reports}


class EarlyHealth:
    """Answers plain requests for /health while all is well; everything else goes through the application.

    Where all cores compute, each turn of the interpreter may wait for one, and the usual way has many.

    Args:
        app: the application.
        health: what is answered.
        access_log: records the requests.
        seen: is called with each of them.
    """

    def __init__(
        self, app: ASGIApp, health: EngineHealth, access_log: AccessLog, seen: Callable[[Scope], object]
    ) -> None:
        self._app = app
        self._health = health
        self._access_log = access_log
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or call the application."""
        if scope["type"] != "http" or scope["path"] != "/health" or not _is_plain(scope):
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        self._seen(scope)
        try:
            body = json.dumps(self._health.report(), separators=(",", ":")).encode()
        except (HttpError, EngineDeadError):
            await self._app(scope, receive, send)
            return
        own = self._access_log.named(scope["headers"])
        headers = [
            (b"content-length", str(len(body)).encode()),
            (b"content-type", b"application/json"),
            (b"x-request-id", own.shown.encode()),
        ]
        self._access_log.ended("health", own, 200, time.monotonic() - begin)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _is_plain(scope: Scope) -> bool:
    """True if no guard would refuse the request, and no middleware would add to its answer."""
    headers = scope["headers"]
    return (
        scope["method"] == "GET"
        and scope["http_version"] in ("1.0", "1.1")
        and not scope["query_string"]
        and len(headers) <= _MAX_PLAIN_HEADERS
        and not any(name in _NOT_PLAIN for name, _ in headers)
        and sum(len(name) + len(value) for name, value in headers) <= 8192
    )
