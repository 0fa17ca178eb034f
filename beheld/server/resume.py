"""Streams that can be resumed: an answer continues for a while without its client, and its events are kept.

POST with X-Resumable: true  ->  task: chunks -> Recording  ->  follower 1 (cut)
GET /v1/streams/NAME with Last-Event-ID: NAME:7             ->  follower 2, from event 8
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from beheld.server.admission import AdmissionControl
from beheld.server.errors import DIALECT, Dialect, HttpError, http_error
from beheld.server.field_names import FieldNames
from beheld.server.stream import SSE_HEADERS, Chunk, Finished, Gone, LongChunk, event_of, event_pieces, until_gone

HEADER = "X-Resumable"
KEPT_S = 60.0


class Recording:
    """The events of one answer, for followers that come and go.

    Attributes:
        name: its id; events have the ids NAME:0, NAME:1, ...
        owner: the client that may follow it.
        num_bytes: bytes of the events that are kept.
        over: all events have been added.
    """

    def __init__(self, store: RecordingStore, owner: str) -> None:
        self.name = store.named(uuid.uuid4().hex)
        self.owner = owner
        self.num_bytes = 0
        self.over = False
        self.task: asyncio.Task[None] | None = None
        self._store = store
        self._events: deque[bytes] = deque()
        self._first = 0
        # Position of the next event of each follower.
        self._followers: dict[object, int] = {}
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def followed(self) -> bool:
        """True while a client reads it."""
        return bool(self._followers)

    async def add(self, event: bytes) -> None:
        """Append an event; waits for followers if there is no room.

        Raises:
            Gone: there is no room, and nobody reads.
        """
        data = b"id: %s:%d\n%s" % (self.name.encode(), self._first + len(self._events), event)
        while not self._store.has_room(len(data), self):
            if not self.followed:
                raise Gone
            if not self._forget_read():
                await self._changed.wait()
        self._events.append(data)
        self._count(len(data))
        self._notify()

    def end(self) -> None:
        """No further events come."""
        self.over = True
        self._notify()
        if not self.followed:
            self.wait_for_followers()

    def check(self, start: int) -> None:
        """Raise HttpError 410 unless the events from number `start` are kept."""
        if not self._first <= start <= self._first + len(self._events):
            raise HttpError(410, "The next events of this stream are not kept.", "Send the request again.")

    async def events(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from number `start` to the end of the answer.

        Raises:
            HttpError: some of them are no longer kept.
        """
        self.check(start)
        follower = object()
        self._followers[follower] = start
        self._stop_timer()
        try:
            while True:
                place = self._followers[follower] - self._first
                if place < len(self._events):
                    yield self._events[place]
                    self._followers[follower] += 1
                    self._notify()
                elif self.over:
                    return
                else:
                    await self._changed.wait()
        finally:
            del self._followers[follower]
            self._notify()
            if not self.followed:
                self.wait_for_followers()

    def drop(self) -> None:
        """Forget the events, and end the answer if it is still running."""
        self._stop_timer()
        self._store.discard(self)
        if self.task is not None and not self.over:
            self.task.cancel()

    def _forget_read(self) -> bool:
        """Forget the events that every follower has read; True if there were any."""
        count = min(self._followers.values()) - self._first
        for _ in range(count):
            self._count(-len(self._events.popleft()))
        self._first += count
        return count > 0

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._store.count(self, num_bytes)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def wait_for_followers(self) -> None:
        """Drop the recording unless somebody reads it soon."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._store.kept_s, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RecordingStore:
    """The recordings of a server, under a bound of bytes; complete ones that nobody reads make room.

    Args:
        max_bytes: the most bytes of all recordings together; 0 keeps none.
        admission: ends the answers when the server ends.
        kept_s: seconds that a recording is kept while nobody reads it.
        named: makes a recording's name of a part that is its own.
    """

    def __init__(
        self,
        max_bytes: int,
        admission: AdmissionControl,
        kept_s: float = KEPT_S,
        named: Callable[[str], str] = "stream-{}".format,
    ) -> None:
        self.named = named
        self.max_bytes = max_bytes
        self.kept_s = kept_s
        self._admission = admission
        self._kept: OrderedDict[str, Recording] = OrderedDict()
        self.num_bytes = 0

    def record(
        self, chunks: AsyncGenerator[Chunk, None], finished: Finished, names: FieldNames, owner: str
    ) -> Recording:
        """Start to record an answer. `chunks`, `finished` and `names` are those of stream.EventStream."""
        recording = Recording(self, owner)
        self._kept[recording.name] = recording
        # The client may leave before it reads anything.
        recording.wait_for_followers()
        recording.task = asyncio.create_task(self._run(recording, chunks, finished, names))
        return recording

    def get(self, name: str, owner: str) -> Recording:
        """The recording of that name.

        Raises:
            HttpError: 404 if there is none of this client.
        """
        found = self._kept.get(name)
        if found is None or found.owner != owner:
            raise HttpError(
                404,
                f"There is no stream {name[:64]!r}.",
                f"It is kept for {self.kept_s:g} s after its client left. Send the request again.",
                code="stream_not_found",
            )
        return found

    def has_room(self, num_bytes: int, asking: Recording) -> bool:
        """True if there is room for so many bytes, after complete recordings that nobody reads made room."""
        if self.num_bytes + num_bytes > self.max_bytes:
            for other in list(self._kept.values()):
                if other is not asking and other.over and not other.followed:
                    other.drop()
                if self.num_bytes + num_bytes <= self.max_bytes:
                    break
        # One event always fits, so that a stream goes on however small the bound is.
        return self.num_bytes + num_bytes <= self.max_bytes or not asking.num_bytes

    def discard(self, recording: Recording) -> None:
        """Forget a recording."""
        if self._kept.pop(recording.name, None) is not None:
            self.num_bytes -= recording.num_bytes

    def count(self, recording: Recording, num_bytes: int) -> None:
        """Count bytes that a recording has added, or forgotten if negative."""
        if recording.name in self._kept:
            self.num_bytes += num_bytes

    async def _run(
        self, recording: Recording, chunks: AsyncGenerator[Chunk, None], finished: Finished, names: FieldNames
    ) -> None:
        dialect = DIALECT.get()
        outcome: Exception | None = Gone()
        with self._admission.known():
            try:
                failure: HttpError | None = None
                try:
                    async for chunk in chunks:
                        await recording.add(await _event_of(chunk, dialect))
                except Gone:
                    raise
                except Exception as error:
                    failure = http_error(error, names)
                    await recording.add(event_of(failure.event(), dialect))
                if dialect.last_event:
                    await recording.add(dialect.last_event)
                outcome = failure
            except Gone:
                self.discard(recording)
            finally:
                with contextlib.suppress(Exception):
                    await chunks.aclose()
                finished(outcome)
                recording.end()


async def _event_of(chunk: Chunk, dialect: Dialect) -> bytes:
    """One server-sent event; a long one is written in several turns of the loop."""
    if not isinstance(chunk, LongChunk):
        return event_of(chunk, dialect)
    pieces: list[bytes] = []
    for piece in event_pieces(chunk, dialect):
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces)


class Follower(Response):
    """A recording as server-sent events, from one of them on; a client that disconnects leaves the answer running."""

    media_type = "text/event-stream"

    def __init__(self, recording: Recording, start: int = 0) -> None:
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._events = recording.events(start)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with contextlib.suppress(Gone, OSError):
            await until_gone(self._send(send), receive)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def start_of(last: str | None, name: str) -> int:
    """The number of the event after Last-Event-ID; 0 without that header.

    Raises:
        HttpError: it is not an id of this stream.
    """
    if last is None:
        return 0
    stream, _, number = last.rpartition(":")
    if stream != name or not (number.isascii() and number.isdigit() and len(number) < 12):
        raise HttpError(400, "Last-Event-ID is not of this stream.", "Send the id of the last event that arrived.")
    return int(number) + 1
