"""The HTTP protocol with deadlines: slow headers are cut, and so are clients that do not read or are gone."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from beheld.server.errors import HttpError

MAX_HEADERS = 100
_CLOSE = {"Connection": "close"}
# How often a client that has closed its sending side is asked whether it still listens, until its answer begins.
_PROBE_S = 0.2
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class FrameGuard:
    """Refuses what two servers in a row may read in two ways, and floods of headers; the connection ends with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 400 or 431."""
        if scope["type"] == "http":
            names = [name for name, _ in scope["headers"]]
            error: HttpError | None = None
            if len(names) > MAX_HEADERS:
                error = HttpError(431, f"There are more than {MAX_HEADERS} headers.", headers=_CLOSE)
            elif b"transfer-encoding" in names and b"content-length" in names:
                error = HttpError(400, "The length of the body is said in two ways.", headers=_CLOSE)
            elif scope["http_version"] not in ("1.0", "1.1"):
                error = HttpError(400, "This version of HTTP is not spoken here.", headers=_CLOSE)
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class DeadlineProtocol(H11Protocol):
    """uvicorn's protocol over h11, which is strict about framing, and two timers.

    Attributes:
        header_s: from a connection's start, or a request's first byte, to the end of its headers.
        send_s: for how long the client may leave what was sent unread.
    """

    header_s = 10.0
    send_s = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Headers are awaited from now on."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.header_s, self._cut_headers)

    def data_received(self, data: bytes) -> None:
        """Bytes came: the headers are complete, or have begun."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._header_timer = _cancelled(self._header_timer)
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_s, self._cut_headers)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it may have gone, or it may wait for the answer to its complete request.

        Both look alike until something is sent to it. Tokens of a stream are; before an answer begins, HTTP's interim
        responses are, which every client must skip. What is sent to one that has gone comes back as a reset, and that
        ends the request.
        """
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not waits or self.scope["http_version"] != "1.1":
            return False
        self._half_closed = True
        self._probe()
        return True

    def on_response_complete(self) -> None:
        """As uvicorn's; and the end of a connection on which no request can come any more."""
        super().on_response_complete()
        if self._half_closed and not self.transport.is_closing():
            if self.cycle.response_complete:
                self.transport.close()
            elif self._probe_timer is None:
                self._probe()

    def _probe(self) -> None:
        self._probe_timer = None
        if self.cycle.response_started or self.transport.is_closing():
            return
        self.transport.write(self.conn.send(h11.InformationalResponse(status_code=102, headers=[])) or b"")
        self._probe_timer = self.loop.call_later(_PROBE_S, self._probe)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._send_timer = _cancelled(self._send_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of all timers."""
        super().connection_lost(exc)
        self._header_timer = _cancelled(self._header_timer)
        self._send_timer = _cancelled(self._send_timer)
        self._probe_timer = _cancelled(self._probe_timer)

    def _cut_headers(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.write(_TOO_SLOW)
            self.transport.close()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; None, to put in its place."""
    if timer is not None:
        timer.cancel()
    return None
