"""The HTTP protocol with deadlines: slow headers are cut, and so are clients that do not read or are gone."""

from __future__ import annotations

import asyncio
import contextlib
import http
import sys
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from beheld.server.access_log import NO_ROUTE, AccessLog, name_of, number
from beheld.server.errors import HttpError
from beheld.server.keys import OPEN_PATHS
from beheld.server.write_coalescing import CoalescingTransport

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
_CLOSE = {"Connection": "close"}
# How often a client that has closed its sending side is asked whether it still listens, until its answer begins.
_PROBE_S = 0.2
# How long a client may go on sending when its answer was given early, and how long it may be silent meanwhile.
_FAREWELL_S = 2.0
_SILENCE_S = 0.25


class Farewell:
    """Lets an answer be given before its request was read whole.

    The answer is sent at once. A connection that is closed while its client still sends is reset, and then the client
    never reads why; so what comes is thrown away for a moment, and the connection ends after that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        comes = True

        async def took() -> Message:
            nonlocal comes
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                comes = False
            return message

        async def said(message: Message) -> None:
            if comes and message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            elif comes and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await _drain(took, lambda: comes)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, took, said)


def _has_body(scope: Scope) -> bool:
    said = dict(scope["headers"])
    return b"transfer-encoding" in said or said.get(b"content-length", b"0") != b"0"


async def _drain(receive: Receive, comes: Callable[[], bool]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            while comes():
                await asyncio.wait_for(receive(), _SILENCE_S)


class FrameGuard:
    """Refuses what two servers in a row may read in two ways, and floods of headers and of connections; the connection
    ends with it.

    Args:
        app: what stands behind it.
        crowded: whether there are more connections than the server takes. /health is answered nevertheless.
    """

    def __init__(self, app: ASGIApp, crowded: Callable[[], bool]) -> None:
        self._app = app
        self._crowded = crowded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 400, 431 or 503."""
        error = self._error(scope) if scope["type"] == "http" else None
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _error(self, scope: Scope) -> HttpError | None:
        headers = scope["headers"]
        names = [name for name, _ in headers]
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) + 4 for k, v in headers)
        if len(names) > MAX_HEADERS:
            return HttpError(431, f"There are more than {MAX_HEADERS} headers.", "Send fewer.", headers=_CLOSE)
        if size > MAX_HEADER_BYTES:
            return _headers_too_large()
        if b"transfer-encoding" in names and b"content-length" in names:
            return HttpError(400, "The length of the body is said in two ways.", "Say it in one.", headers=_CLOSE)
        if scope["http_version"] not in ("1.0", "1.1"):
            return HttpError(400, "This version of HTTP is not spoken here.", "Speak HTTP/1.1.", headers=_CLOSE)
        if self._crowded() and scope["path"] not in OPEN_PATHS:
            more = {**_CLOSE, "Retry-After": "1"}
            return HttpError(503, "The server has too many connections.", "Try again.", code="busy", headers=more)
        return None


def _headers_too_large() -> HttpError:
    return HttpError(
        431, f"The headers have more than {MAX_HEADER_BYTES} bytes.", "Send what is long in the body.", headers=_CLOSE
    )


class DeadlineProtocol(H11Protocol):
    """uvicorn's protocol over h11, which is strict about framing, and two timers.

    Attributes:
        header_s: from a connection's start, or a request's first byte, to the end of its headers.
        send_s: for how long the client may leave what was sent unread.
        request_log: is told of requests that never become one.
    """

    request_log: AccessLog

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
        super().connection_made(CoalescingTransport(transport, self.loop))
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

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP. uvicorn calls this where it handles h11's error, which says more than its text."""
        error = sys.exc_info()[1]
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(_headers_too_large())
        else:
            self._refuse(HttpError(400, "This is not HTTP as it should be.", "Speak HTTP/1.1.", headers=_CLOSE))

    def _cut_headers(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            seconds = f"{self.header_s:g} seconds"
            self._refuse(HttpError(408, f"The headers did not arrive within {seconds}.", "Send them faster."))

    def _refuse(self, error: HttpError) -> None:
        """Answer what no application ever sees, unless another answer has begun; and end the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            own = number()
            answer = error.response()
            answer.headers["connection"] = "close"
            answer.headers["x-request-id"] = name_of(own)
            head = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n".encode()
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
            self.transport.write(head + lines + b"\r\n" + bytes(answer.body))
            self.request_log.ended(NO_ROUTE, own, error.status, 0.0)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; None, to put in its place."""
    if timer is not None:
        timer.cancel()
    return None
