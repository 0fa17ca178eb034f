"""Shutdown: the end of answers that the server's own end cuts off: their clients are told so."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beheld.server.admission import Admission
from beheld.server.errors import HttpError
from beheld.server.stream import LAST_EVENT, event_of


class CutOff:
    """Answers in place of what is cancelled by `Admission.cut_off`: with 503, or in a stream with an event.

    Args:
        app: what stands behind it.
        admission: knows every request's task, from here to its end.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun: Message | None = None
        ended = False

        async def said(message: Message) -> None:
            nonlocal begun, ended
            begun = begun or message
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        with self._admission.known() as task:
            try:
                await self._app(scope, receive, said)
                return
            except asyncio.CancelledError:
                if not self._admission.cut or ended or task.uncancel():
                    raise
        error = HttpError(
            503,
            "The server has ended before this answer.",
            "Ask again when it has started anew.",
            code="draining",
            headers={"Retry-After": "30", "Connection": "close"},
        )
        if begun is None:
            await error.response()(scope, receive, send)
        elif scope["state"]["streamed"]:
            scope["state"]["outcome"] = error.status
            last = event_of(error.body()) + LAST_EVENT
            await send({"type": "http.response.body", "body": last, "more_body": False})
