"""Shutdown: notifies the clients of answers that the server's end cuts off."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beheld.server.admission import AdmissionControl
from beheld.server.errors import DIALECT, HttpError
from beheld.server.stream import event_of


class CutOff:
    """Responds in place of requests that `AdmissionControl.cut_off` cancels: with 503, or with an event in a stream.

    Args:
        app: the application.
        admission: registers the task of every request.
    """

    def __init__(self, app: ASGIApp, admission: AdmissionControl) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun: Message | None = None
        ended = False

        async def send_checked(message: Message) -> None:
            nonlocal begun, ended
            begun = begun or message
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        with self._admission.known() as task:
            try:
                await self._app(scope, receive, send_checked)
                return
            except asyncio.CancelledError:
                if not self._admission.cut or ended or task.uncancel():
                    raise
        error = HttpError(
            503,
            "The server shut down before this answer was complete.",
            "Try again after the restart.",
            code="draining",
            headers={"Retry-After": "30", "Connection": "close"},
        )
        if begun is None:
            await error.response()(scope, receive, send)
            return
        # A body that has begun and is not complete shows its end by the cut of its connection.
        scope["state"]["outcome"] = error.status
        if scope["state"]["streamed"]:
            dialect = DIALECT.get()
            last = event_of(error.event(), dialect) + dialect.last_event
            await send({"type": "http.response.body", "body": last, "more_body": False})
