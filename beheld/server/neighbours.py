"""The fronts of one server: what belongs to one of them is asked of it over a private Unix socket.

    client -> front 2 -- /v1/responses, /sleep, /metrics ... --> front 0
                      -- /v1/streams/stream-1.NAME ------------> front 1

The sockets are in a folder that only this user may enter. A request that comes over them says who its client is, in a
header that no client can send: elsewhere the header has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from beheld.api.front_place import ALONE, FrontPlace
from beheld.server.admission import AdmissionControl
from beheld.server.errors import DIALECT, HttpError, dialect_of
from beheld.server.http_protocol import Farewell
from beheld.server.passage import ClientLeftError, PassageError, answer_of
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_HEADER = b"x-beheld-client"
# Between a front and its neighbour each request has a connection of its own, and these have no meaning beyond one.
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade"))
_STREAM = re.compile(r"/v1/streams/stream-([0-9]{1,4})\.")
# What one front keeps for all: the responses that it stores, and the sums of what all count.
_OF_FIRST = ("/v1/responses", "/metrics")
_ASK_S = 1.0
# At such intervals who waits for another front sees whether that one hangs.
_LOOK_S = 0.5


@dataclass(frozen=True)
class Neighbours:
    """The fronts of a server.

    Attributes:
        place: which of them this process is.
        folder: where their sockets are; empty if there is one front.
        table: the descriptor of the fronts' table, the same in all; -1 if there is one front.
        secret: of the names that clients get, which all fronts give alike; empty for one of its own.
    """

    place: FrontPlace = ALONE
    folder: str = ""
    table: int = -1
    secret: bytes = field(default=b"", repr=False)

    @property
    def first(self) -> bool:
        """Whether this front has what there is once."""
        return self.place.number == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.place.count > 1

    def path(self, number: int) -> Path:
        """The socket of a front."""
        return Path(self.folder, str(number))

    def listen(self) -> socket.socket:
        """This front's socket."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self.path(self.place.number)
        # An earlier life of this front may have left its own.
        path.unlink(missing_ok=True)
        made.bind(str(path))
        made.listen()
        return made

    def named(self, name: str) -> str:
        """A stream's name that says which front has it."""
        return f"stream-{self.place.number}.{name}" if self.several else f"stream-{name}"

    def owner_of(self, path: str, operators: Collection[str]) -> int | None:
        """The front that a request of this path belongs to; None if each may answer it."""
        found = _STREAM.match(path)
        if found is not None:
            number = int(found[1])
            return number if number < self.place.count else None
        if path in operators or any(path == own or path.startswith(f"{own}/") for own in _OF_FIRST):
            return 0
        return None


NONE = Neighbours()
"""The one front of a server."""


@dataclass(frozen=True)
class Figures:
    """What the other fronts have to add to a front's figures.

    Attributes:
        texts: of each that ever answered, and what those had counted that were started anew.
        num_fronts: how many fronts there are, with the one that asks.
        num_new: how many of them have answered now.
    """

    texts: Sequence[bytes] = ()
    num_fronts: int = 1
    num_new: int = 1


class Forwarding:
    """Passes requests on to the fronts that they belong to, and takes those that others pass on.

    Args:
        app: the application.
        neighbours: the fronts.
        operators: paths of the operator's routes.
        admission: knows that a request is passed on.
        peer_of: the name of a request's connection.
        figures: by path, what this front has to add to the figures of another one that asks.
        refuses: whether the application refuses a request by its frame, as it came.
        hangs: whether a front gives no sign of life.
        restarts: how often each front was started anew.
        counted: of the figures of fronts that have ended, what the figures of all keep.
        orders: by path, what this front does for another one that tells it something.
    """

    def __init__(
        self,
        app: ASGIApp,
        neighbours: Neighbours,
        operators: Collection[str],
        admission: AdmissionControl,
        peer_of: Callable[[Scope], str],
        figures: Mapping[str, Callable[[], bytes]],
        refuses: Callable[[Scope], bool],
        hangs: Callable[[int], bool],
        restarts: Callable[[], Sequence[int]],
        counted: Callable[[Sequence[bytes]], bytes],
        orders: Mapping[str, Callable[[bytes], Awaitable[None]]],
    ) -> None:
        self._app = app
        self._neighbours = neighbours
        self._operators = frozenset(operators)
        self._admission = admission
        self._peer_of = peer_of
        self._figures = figures
        self._refuses = refuses
        self._hangs = hangs
        self._restarts = restarts
        self._counted = counted
        self._orders = orders
        # What each other front answered last, by its number and the path, and after how many restarts.
        self._last: dict[tuple[int, str], tuple[int, bytes]] = {}
        # Of earlier lives of fronts, by the path.
        self._ended: dict[str, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application here or in another process."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["state"].get("private"):
            restored = _restored(scope)
            figures = self._figures.get(scope["path"]) if restored is None else None
            order = self._orders.get(scope["path"]) if restored is None else None
            if order is not None:
                await order(b"".join([part async for part in _body(receive, asyncio.Event())]))
                await Response()(scope, receive, send)
            elif figures is not None:
                await Response(figures())(scope, receive, send)
            elif restored is not None:
                await self._app(restored, receive, send)
            else:
                await Response(status_code=404)(scope, receive, send)
            return
        owner = self._neighbours.owner_of(scope["path"], self._operators)
        if owner is None or owner == self._neighbours.place.number or self._refuses(scope):
            await self._app(scope, receive, send)
            return
        with self._admission.passing():
            passing = _refused if self._hangs(owner) else partial(self._pass_on, owner)
            await Farewell(passing)(scope, receive, send)

    async def _pass_on(self, owner: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Let another front answer; the client's leaving ends the request there, too.

        A front that hangs meanwhile may never end its connections: the wait for it ends here.
        """
        whole, begun = asyncio.Event(), asyncio.Event()
        work = asyncio.ensure_future(self._answered(owner, scope, _body(receive, whole), begun, receive, send))
        watch = asyncio.ensure_future(_left(receive, whole))
        hung = asyncio.ensure_future(self._hung(owner))
        tasks = (work, watch, hung)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answered = work.done()
            for task in tasks:
                if not task.done():
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not work.cancelled():
            work.result()
        if hung.done() and not hung.cancelled() and not answered:
            logger.warning("Front %d does not answer (it hangs).", owner)
            if not begun.is_set():
                await _refused(scope, receive, send)

    async def _hung(self, owner: int) -> None:
        """Wait until a front hangs."""
        while not self._hangs(owner):
            await asyncio.sleep(_LOOK_S)

    async def _answered(
        self,
        owner: int,
        scope: Scope,
        body: AsyncIterator[bytes],
        begun: asyncio.Event,
        receive: Receive,
        send: Send,
    ) -> None:
        query = scope["query_string"]
        target = scope["raw_path"].split(b"?")[0] + (b"?" + query if query else b"")
        headers = [(name, value) for name, value in scope["headers"] if name not in (*_OF_CONNECTIONS, _HEADER)]
        names = {name for name, _ in scope["headers"]}
        if b"transfer-encoding" in names:
            headers.append((b"transfer-encoding", b"chunked"))
        if b"host" not in names:
            # HTTP/1.0 may leave it out; an empty one is not more than none.
            headers.append((b"host", b""))
        sender = {"client": scope.get("client"), "peer": self._peer_of(scope)}
        headers.append((_HEADER, json.dumps(sender).encode()))
        try:
            path = self._neighbours.path(owner)
            async with aclosing(answer_of(path, scope["method"], target, headers, body)) as answer:
                async for event in answer:
                    if isinstance(event, h11.Data):
                        await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                        continue
                    kept = [(k, v) for k, v in event.headers if k not in (*_OF_CONNECTIONS, b"date")]
                    begun.set()
                    await send({"type": "http.response.start", "status": event.status_code, "headers": kept})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except PassageError as error:
            logger.warning("Front %d does not answer (%s).", owner, error)
            if begun.is_set():
                # The cut of the connection shows that the answer is not whole.
                return
            await _refused(scope, receive, send)

    async def ask_others(self, path: str) -> Figures:
        """The figures of all other fronts; of one that does not answer soon, those that it gave last.

        Sums of counters that left some out, or those of a front's earlier lives, would seem to fall.
        """
        numbers = [each for each in range(self._neighbours.place.count) if each != self._neighbours.place.number]
        lives = self._restarts()
        for number in numbers:
            life, text = self._last.get((number, path), (lives[number], b""))
            if life != lives[number]:
                del self._last[number, path]
                self._ended[path] = self._counted([self._ended.get(path, b""), text])
        found = await asyncio.gather(*(self._ask(number, path) for number in numbers))
        now = self._restarts()
        num_new = 0
        for number, answer in zip(numbers, found, strict=True):
            # One that was started anew meanwhile may be among those that have ended.
            if answer is not None and now[number] == lives[number]:
                self._last[number, path] = lives[number], answer
                num_new += 1
        known = [self._last[number, path][1] for number in numbers if (number, path) in self._last]
        ended = [self._ended[path]] if path in self._ended else []
        return Figures([*known, *ended], 1 + len(numbers), 1 + num_new)

    async def tell_others(self, path: str, body: bytes) -> None:
        """Give an order to all other fronts; one that does not answer soon may not carry it out."""
        numbers = (each for each in range(self._neighbours.place.count) if each != self._neighbours.place.number)
        await asyncio.gather(*(self._ask(number, path, body) for number in numbers))

    async def _ask(self, number: int, path: str, body: bytes | None = None) -> bytes | None:
        headers = [(b"host", b""), *([(b"content-length", b"%d" % len(body))] if body is not None else ())]
        method, sent = ("GET", _nothing()) if body is None else ("POST", _once(body))
        answer = answer_of(self._neighbours.path(number), method, path.encode(), headers, sent)
        try:
            async with asyncio.timeout(_ASK_S), aclosing(answer):
                events = [event async for event in answer]
        except (TimeoutError, PassageError):
            return None
        if any(isinstance(event, h11.Response) and event.status_code != 200 for event in events):
            return None
        return b"".join(bytes(event.data) for event in events if isinstance(event, h11.Data))


async def _refused(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that the front that has this does not answer."""
    DIALECT.set(dialect_of(scope["path"]))
    refusal = HttpError(
        503,
        "The part of the server that has this does not answer.",
        "Try again.",
        code="busy",
        headers={"Retry-After": "1", "Connection": "close"},
    )
    await refusal.response()(scope, receive, send)


async def _nothing() -> AsyncIterator[bytes]:
    """The body of a request that has none."""
    return
    yield b""


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _body(receive: Receive, whole: asyncio.Event) -> AsyncIterator[bytes]:
    """The body of a request; `whole` is set at its end."""
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return
    finally:
        whole.set()


async def _left(receive: Receive, whole: asyncio.Event) -> None:
    """Wait until the client has left, after its body is read."""
    await whole.wait()
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


def _restored(scope: Scope) -> Scope | None:
    """The scope of a request that another front has passed on, as that one has it; None of a front's own question."""
    said = next((value for name, value in scope["headers"] if name == _HEADER), None)
    if said is None:
        return None
    sender: dict[str, Any] = json.loads(said)
    client = sender["client"]
    scope["state"]["peer"] = sender["peer"]
    headers = [(name, value) for name, value in scope["headers"] if name != _HEADER]
    return {**scope, "client": None if client is None else tuple(client), "headers": headers}
