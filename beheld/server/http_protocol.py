"""The HTTP protocol with deadlines: disconnects clients that send headers slowly, do not read, or are gone."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from beheld.server.access_log import NO_ROUTE, AccessLog
from beheld.server.admission import Places
from beheld.server.errors import HttpError, http_error
from beheld.server.keys import OPEN_PATHS
from beheld.server.parse_turns import ParseTurns
from beheld.server.slowest import Slowest
from beheld.server.write_coalescing import CoalescingTransport
from beheld.utils.log import get_logger, once
from beheld.utils.loop_share import LoopShare

logger = get_logger(__name__)

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
# Chunked bodies: this many chunks may have any size, and each further one must have this many bytes of content on
# average. Ordinary clients send chunks as they write; only an attack sends megabytes in tiny chunks.
MAX_TINY_CHUNKS = 4096
MIN_CHUNK_BYTES = 128
# Events that one connection parses before others have their turn: about a millisecond.
_EVENTS = 48
# Bytes of a body of known length that come with one turn: they are copied and hardly parsed. TLS gives 32 KiB at once.
_BYTES_IN_TURN = 256 << 10
# Bytes that a client must read within `send_s` while more of an answer waits: 2 KiB a second.
_LEAST_READ = 64 << 10
_CLOSE = {"Connection": "close"}
# Interval of the checks whether a client that has closed its sending side is still there, until its response starts.
_PROBE_S = 0.2
# How long a client may continue to send after an early response, and how long it may pause meanwhile.
_FAREWELL_S = 2.0
_SILENCE_S = 0.25


class Farewell:
    """Allows a response before its request was read completely.

    The response is sent at once, and nothing that arrives later is parsed. Closing a connection while its client is
    still sending resets it, and the client never reads the response. So incoming data is discarded for a moment before
    the connection closes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        comes = True
        dropped: Awaitable[None] | None = None

        async def receive_early() -> Message:
            nonlocal comes
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                comes = False
            return message

        async def send_early(message: Message) -> None:
            nonlocal dropped
            if comes and message["type"] == "http.response.start":
                drop_body = scope["state"].get("drop_body")
                # None if the client is gone.
                dropped = None if drop_body is None else drop_body()
                headers = [(name, value) for name, value in message["headers"] if name != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            elif dropped is not None and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await dropped
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receive_early, send_early)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


class FrameGuard:
    """Refuses requests that two chained servers may parse differently, and floods of headers or connections.

    A refusal closes the connection.

    Args:
        app: the application.
        crowded: returns whether there are more connections than a request's peer may have a part in; /health is
            answered anyway.
    """

    def __init__(self, app: ASGIApp, crowded: Callable[[Scope], bool]) -> None:
        self._app = app
        self._crowded = crowded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or respond with 400, 431 or 503."""
        error = self.refusal(scope) if scope["type"] == "http" else None
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def refusal(self, scope: Scope) -> HttpError | None:
        """What a request is refused with, if it is."""
        headers = scope["headers"]
        names = [name for name, _ in headers]
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) + 4 for k, v in headers)
        if len(names) > MAX_HEADERS:
            return HttpError(431, f"There are more than {MAX_HEADERS} headers.", "Send fewer.", headers=_CLOSE)
        if size > MAX_HEADER_BYTES:
            return _headers_too_large()
        if b"transfer-encoding" in names and b"content-length" in names:
            return HttpError(400, "The length of the body is given in two ways.", "Give it in one.", headers=_CLOSE)
        if scope["http_version"] not in ("1.0", "1.1"):
            return HttpError(400, "This version of HTTP is not supported.", "Use HTTP/1.1.", headers=_CLOSE)
        if self._crowded(scope) and scope["path"] not in OPEN_PATHS:
            more = {**_CLOSE, "Retry-After": "1"}
            return HttpError(503, "The server has too many connections.", "Try again.", code="busy", headers=more)
        return None


def _headers_too_large() -> HttpError:
    return HttpError(
        431, f"The headers have more than {MAX_HEADER_BYTES} bytes.", "Send long content in the body.", headers=_CLOSE
    )


class TinyChunksError(h11.RemoteProtocolError):
    """The chunks of a body cost far more than their content."""


class BoundedConnection(h11.Connection):
    """h11's connection with a limited number of events per turn; refuses bodies in tiny chunks.

    Attributes:
        left: events that this turn still allows.
        paused: a request arrived before the previous one was answered.
        remaining: bytes still to arrive of a body with known length; else 0.
    """

    left = 0
    paused = False
    remaining = 0
    _chunks = 0
    _content = 0

    @property
    def num_kept(self) -> int:
        """Bytes that are received and in no event yet: of headers that are not whole, or of a next request."""
        return len(self._receive_buffer)

    def next_event(self) -> Any:
        """The next event; h11.NEED_DATA at the end of a turn."""
        if not self.left:
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # h11 raises it in a method of the error: its traceback would keep the connection until the next collection.
            raise error.with_traceback(None) from None
        self.paused = event is h11.PAUSED
        if event is h11.NEED_DATA or self.paused:
            return event
        self.left -= 1
        if isinstance(event, h11.Request):
            self._chunks = self._content = 0
            length = next((value for name, value in event.headers if name == b"content-length"), b"")
            self.remaining = int(length) if length.isdigit() else 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._content += len(event.data)
            self.remaining = max(0, self.remaining - len(event.data))
            if self._chunks > MAX_TINY_CHUNKS + self._content // MIN_CHUNK_BYTES:
                raise TinyChunksError("The chunks are too small.")
        return event


class DeadlineProtocol(H11Protocol):
    """uvicorn's h11 protocol with strict framing, two timers, and turns.

    The protocol parses incoming data for about a millisecond. The rest waits for its turn among the other connections
    that have some, and nothing more is read from the connection meanwhile.

    Attributes:
        turns: shared by all connections of a server.
        parse_turns: likewise; when the first of what has come may be parsed.
        places: the places of all connections of a server.
        buffers: the bytes that they keep, parsed too late or read too late by their clients.
        unread: those whose clients do not read.
        peer_of: returns who has opened a connection, by its address; empty if all are to be one.
        header_s: seconds from a connection's start, or a request's first byte, to the end of its headers.
        send_s: seconds within which the client must read some of what is sent.
        request_log: records requests that never reach the application.
        private: only other fronts of the server can connect.
    """

    request_log: AccessLog
    turns: LoopShare
    parse_turns: ParseTurns
    places: Places
    buffers: Places
    unread: Slowest[DeadlineProtocol]
    peer_of: Callable[[str], str]
    conn: BoundedConnection
    transport: CoalescingTransport

    header_s = 10.0
    send_s = 30.0
    private = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._half_closed = False
        self.conn = BoundedConnection(h11.SERVER, MAX_HEADER_BYTES)
        own = {"private": self.private, "drop_body": self._drop_body, "write_piece": self._write_piece}
        self.app_state = {**self.app_state, **own}
        self._unparsed = bytearray()
        # Bytes of an answer that is not read, and all that is counted; those of a body that need no turn.
        self._unread = self._kept = self._granted = 0
        self._waiting = self._lost = False
        self._dropping: asyncio.Event | None = None
        self._came_at = 0.0
        self._peer = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the headers."""
        super().connection_made(CoalescingTransport(transport, self.loop))
        self._peer = self.app_state["peer"] = self.peer_of(self.client[0] if self.client else "")
        self.places.take(self._peer)
        if self.places.flooded(self._peer):
            # Even sending a refusal would take memory and a descriptor for each.
            self.transport.abort()
            return
        self._header_timer = self.loop.call_later(self.header_s, self._cut_headers)

    def data_received(self, data: bytes) -> None:
        """Restart or stop the timer for the headers, and parse the data."""
        try:
            self._take(data)
        except MemoryError as error:
            # asyncio would close the connection without a word.
            self._refuse(http_error(error))

    def _take(self, data: bytes) -> None:
        if self._dropping is not None:
            self._drop(data)
            return
        self._unset_keepalive_if_required()
        if not self._waiting and not self._goes_on(len(data)):
            self._granted = max(0, _BYTES_IN_TURN - len(data))
            if not self.parse_turns.take(self._peer, self._parse):
                self._waiting = True
                self.transport.hold_reading()
        if self._waiting:
            self._unparsed += data
        elif self._unparsed or len(data) > max(MAX_HEADER_BYTES, self.conn.remaining):
            self._unparsed += data
            self._parse()
        else:
            # The usual case; it needs no copy.
            self.conn.left = _EVENTS
            self._give(data)
            if not self.conn.left:
                self._wait()
        self._look_at_headers(come=True)
        if not self._keep():
            words = "You have sent more than the server can look at now."
            self._refuse(HttpError(503, words, "Try again.", code="busy", headers={"Retry-After": "1"}))

    def _goes_on(self, size: int) -> bool:
        """Whether so many bytes go on with a body of known length, and come with the last turn."""
        if size > min(self.conn.remaining, self._granted):
            return False
        self._granted -= size
        return True

    def _give(self, piece: bytes) -> None:
        """Let h11 parse a piece, or keep what is not a whole header."""
        self.conn.receive_data(piece)
        self.handle_events()

    def _look_at_headers(self, *, come: bool) -> None:
        """Stop the timer for the headers if they are whole; otherwise start it, if something has come."""
        if self.conn.their_state is not h11.IDLE:
            self._header_timer = _cancelled(self._header_timer)
        elif come and self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_s, self._cut_headers)

    def _keep(self) -> bool:
        """Count what this connection keeps; False if there is no room for it."""
        kept = 0 if self._lost else len(self._unparsed) + self.conn.num_kept + self._unread
        if kept == self._kept:
            return True
        if kept < self._kept:
            self.buffers.give(self._peer, self._kept - kept)
        elif self.buffers.bears(self._peer, kept - self._kept):
            self.buffers.take(self._peer, kept - self._kept)
        else:
            return False
        self._kept = kept
        return True

    def _parse(self) -> bool:
        """Parse for one turn; the rest queues for another. False if the client is gone, which takes no turn."""
        if self._is_reset():
            self.transport.abort()
            return False
        try:
            self._parse_turn()
        except MemoryError as error:
            self._refuse(http_error(error))
        return True

    def _is_reset(self) -> bool:
        """Whether the client has reset the connection, which nobody notices as long as nothing is read from it."""
        own = self.transport.get_extra_info("socket")
        if own is None:
            # Of TLS it is gone a turn of the loop before this protocol hears of it.
            return True
        try:
            return self._lost or own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        except OSError:
            return True

    def _parse_turn(self) -> None:
        self._waiting = False
        if self._dropping is not None or self.transport.is_closing():
            return
        self.conn.left = _EVENTS
        # Events of data that h11 took earlier.
        self.handle_events()
        while self.conn.left and self._unparsed and not self.conn.paused and not self.transport.is_closing():
            # Headers, trailers and chunk frames go to h11 in pieces that it parses quickly; a body of known length goes
            # as it arrives.
            size = max(MAX_HEADER_BYTES, self.conn.remaining)
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            self._give(piece)
        self._look_at_headers(come=False)
        self._keep()
        if self.conn.left and not self._unparsed:
            self.transport.release_reading()
        else:
            self._wait()
        self._look_at_half_closed()

    def _wait(self) -> None:
        """Stop reading until the received data is parsed, in turns."""
        self.transport.hold_reading()
        # Pipelined requests wait for the previous response, which calls this again.
        if not self.conn.paused and not self._waiting:
            self._waiting = True
            self.turns.do(self._parse, self._peer)

    def _write_piece(self, data: bytes) -> bool:
        """Write a piece of a body of unknown length, whose response `send` has started, past all middlewares and h11.

        Middlewares need the start and the end of a response, and h11 has no state that a piece changes: both together
        take longer than all else that a streamed token takes. False if the client is behind or gone, which `send`
        handles.
        """
        if not data or self.flow.write_paused or self.cycle.disconnected:
            # An empty chunk would end the body.
            return False
        # The framing that h11 has chosen for this body.
        chunked = self.conn.their_http_version != b"1.0"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        return True

    def _drop_body(self) -> Awaitable[None]:
        """Parse nothing more of this connection; the result waits briefly for the rest of the body.

        It is complete at once if all of the body has arrived.
        """
        self._dropping = asyncio.Event()
        self._came_at = self.loop.time()
        if not self.cycle.more_body:
            self._dropping.set()
        else:
            self._drop(self.conn.trailing_data[0] + bytes(self._unparsed))
            self._unparsed.clear()
            self._keep()
            self.flow.resume_reading()
            self.transport.release_reading()
        return self._dropped(self._dropping)

    def _drop(self, data: bytes) -> None:
        self._came_at = self.loop.time()
        whole = self.conn.remaining > 0
        self.conn.remaining = max(0, self.conn.remaining - len(data))
        if self._dropping is not None and (not self.conn.remaining if whole else data.endswith(b"0\r\n\r\n")):
            self._dropping.set()

    async def _dropped(self, ended: asyncio.Event) -> None:
        until = self.loop.time() + _FAREWELL_S
        while not ended.is_set() and self.loop.time() < min(until, self._came_at + _SILENCE_S):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _SILENCE_S)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's sending side: the client has gone, or waits for its response.

        The two cases look alike until something is sent. A stream sends tokens; before the response, HTTP's interim
        responses are sent, which every client must skip. If the client has gone, sending causes a reset, which ends the
        request.
        """
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        # TLS closes both sides at once.
        secure = self.transport.get_extra_info("ssl_object") is not None
        if secure or not waits or self.scope["http_version"] != "1.1":
            # Sends what was written in this turn of the loop, which asyncio would drop.
            self.transport.close()
            return False
        self._half_closed = True
        self._probe()
        return True

    def on_response_complete(self) -> None:
        """As uvicorn's; also closes a connection on which no further request can arrive."""
        # What came before this answer's end is parsed in turn: hundreds of connections may have further requests.
        self.conn.left = 0
        super().on_response_complete()
        if self._unparsed or self.conn.num_kept:
            self.conn.paused = False
            self._wait()
        else:
            self._keep()
        self._look_at_half_closed()

    def _look_at_half_closed(self) -> None:
        """Close a connection on which no further request can arrive, unless one waits or is in work."""
        if not self._half_closed or self._waiting or self.transport.is_closing():
            return
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
        """The client does not read: start the timer, and make room for what it leaves unread."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self.unread.begin(self._peer, self)
        while not self._keep():
            # This one is among them.
            slowest = self.unread.of(self._peer) or self
            slowest.cut_unread()
            if slowest is self:
                return
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self.send_s, self._look_at_unread)

    def _look_at_unread(self) -> None:
        """Cut the connection, unless its client has read something since: a large answer may take longer."""
        unread = self.transport.get_write_buffer_size()
        if self._unread - unread < _LEAST_READ:
            self.transport.abort()
            return
        self._unread = unread
        self._keep()
        # Others may have waited for longer now.
        self.unread.end(self._peer, self)
        self.unread.begin(self._peer, self)
        self._send_timer = self.loop.call_later(self.send_s, self._look_at_unread)

    def cut_unread(self) -> None:
        """Close the connection, because there is no room for what its client leaves unread."""
        once(
            logger,
            logging.WARNING,
            "Clients leave more of their answers unread than there is room for; those that "
            "have done so for longest are cut off. --max-reading-mib makes room.",
        )
        self.transport.abort()
        self._read_all()

    def _read_all(self) -> None:
        self.unread.end(self._peer, self)
        self._unread = 0
        self._keep()

    def resume_writing(self) -> None:
        """The client reads again: stop the timer."""
        super().resume_writing()
        self._read_all()
        self._send_timer = _cancelled(self._send_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        super().connection_lost(exc)
        self.places.give(self._peer)
        # These refer back to the protocol; clearing them frees the connection's memory without the garbage collector.
        self.app_state.clear()
        if self.scope is not None:
            for name in ("drop_body", "write_piece"):
                self.scope["state"].pop(name, None)
        self.turns.drop(self._parse, self._peer)
        self._unparsed.clear()
        self._lost = True
        self._read_all()
        if self._dropping is not None:
            self._dropping.set()
        self._header_timer = _cancelled(self._header_timer)
        self._send_timer = _cancelled(self._send_timer)
        self._probe_timer = _cancelled(self._probe_timer)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP. uvicorn calls this while it handles h11's error, which has the details."""
        error = sys.exc_info()[1]
        if isinstance(error, TinyChunksError):
            reason = f"The body comes in more than {MAX_TINY_CHUNKS} chunks of fewer than {MIN_CHUNK_BYTES} bytes."
            self._refuse(HttpError(400, reason, "Send it with Content-Length, or in larger chunks.", headers=_CLOSE))
        elif getattr(error, "error_status_hint", 400) == 431:
            self._refuse(_headers_too_large())
        else:
            self._refuse(HttpError(400, "This is not valid HTTP.", "Use HTTP/1.1.", headers=_CLOSE))

    def _cut_headers(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            seconds = f"{self.header_s:g} seconds"
            self._refuse(HttpError(408, f"The headers did not arrive within {seconds}.", "Send them faster."))

    def _refuse(self, error: HttpError) -> None:
        """Respond without the application, unless another response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            own = self.request_log.named()
            answer = error.response()
            answer.headers["connection"] = "close"
            answer.headers["x-request-id"] = own.shown
            head = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n".encode()
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
            self.transport.write(head + lines + b"\r\n" + bytes(answer.body))
            self.request_log.ended(NO_ROUTE, own, error.status, 0.0)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer and return None as its replacement."""
    if timer is not None:
        timer.cancel()
    return None
