"""Reads a request's body: admission, limits, strict JSON, then the schema."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from typing import Any, TypeVar, TypeVarTuple

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from beheld.server import limits, multipart
from beheld.server.admission import AdmissionControl, Hold
from beheld.server.arriving_body import ArrivingBody
from beheld.server.errors import HttpError
from beheld.server.notes import Notes
from beheld.server.options import ServerOptions
from beheld.server.request_turns import RequestTurns
from beheld.server.speech_schema import values_of
from beheld.server.validation_errors import validation_error
from beheld.utils import bounded_json, piecewise_json
from beheld.utils.bounded_json import JsonBounds, JsonCounts, JsonError, NotJsonError
from beheld.utils.fair_turns import FairTurns
from beheld.utils.gc_tuning import uncollected
from beheld.utils.gil import quick_turns
from beheld.utils.host_turns import HostTurns
from beheld.utils.pace import Pace, paced

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_THREADS = 2
_NOT_JSON = HttpError(400, "The body is not valid JSON in UTF-8.", "Send one JSON object, without a byte order mark.")


class Reader:
    """Reads bodies and bounds their cost to other requests.

    A full server refuses a request before reading it. Large bodies are counted, and threads parse and check them, so
    that the event loop can run between two values.

    Args:
        admission: decides whether another request is accepted.
        options: the server's options.
        bounds: limits of one body's JSON.
        turns: of parsing what is parsed in the event loop.
        host: of parsing what is parsed in threads.
    """

    def __init__(
        self,
        admission: AdmissionControl,
        options: ServerOptions,
        bounds: JsonBounds,
        turns: RequestTurns,
        host: HostTurns,
    ) -> None:
        self._admission = admission
        self._options = options
        self._bounds = bounds
        self._turns = turns
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="beheld-read")
        self._pool_turns = FairTurns(_THREADS, _THREADS)
        self._host = host
        self._large = ThreadPoolExecutor(1, thread_name_prefix="beheld-read-large")

    async def read(self, request: Request, kind: type[B], held: Hold, notes: Notes, made: Callable[[B], T]) -> T:
        """What `made` makes of the request's body, a `kind`.

        `held` counts the body as long as the caller keeps any part of it. `notes` gets the fields without effect.

        Raises:
            HttpError: 400, 408, 413, 415 or 503, with the field at fault if there is one.
            ClientDisconnect: the client disconnected.
        """
        return await self.read_one_of(request, lambda _: kind, held, notes, made)

    async def read_one_of(
        self, request: Request, choose: Callable[[Any], type[B]], held: Hold, notes: Notes, made: Callable[[B], T]
    ) -> T:
        """The same of a body whose kind `choose` says, from its JSON; it may raise HttpError."""
        self._admission.check(client=held.client)
        _check_headers(request)
        body = await self._arrived(request, held)
        found, num_bytes = await self._in_turn(body, held, self._parsed, body, choose, notes, made)
        held.grow_within(num_bytes)
        return found

    async def read_form(self, request: Request, kind: type[B], held: Hold, notes: Notes) -> B:
        """The request's body, a form of speech_schema.py, as a `kind`; otherwise as `read`."""
        self._admission.check(client=held.client)
        boundary = multipart.boundary_of(request.headers.get("content-type", ""))
        _check_encoding(request)
        body = await self._arrived(request, held)
        return await self._in_turn(body, held, _parsed_form, body, boundary, kind, notes)

    async def work(self, held: Hold, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """What a function makes of a body that was read: of a slow one in a thread, as it was parsed."""
        return await self._in_thread(held, function, *arguments) if held.slow else function(*arguments)

    async def _arrived(self, request: Request, held: Hold) -> bytearray | mmap:
        """The whole body."""
        first_s, most_s = self._options.body_s, self._options.body_most_s
        try:
            async with paced(first_s, most_s) as pace:
                return await self._body(request, held, pace)
        except TimeoutError as error:
            raise HttpError(
                408,
                f"The body did not arrive: too little within {first_s:g} seconds, or not all within {most_s:g}.",
                "Send it faster, or send less.",
            ) from error

    async def _in_turn(self, body: bytearray | mmap, held: Hold, parse: Callable[..., T], *arguments: Any) -> T:
        """Parse a small body here, a larger one or one of many objects in a thread."""
        if len(body) <= limits.QUICK_BYTES or (
            len(body) <= limits.INLINE_BYTES and bytes(body).count(b"{") <= limits.INLINE_OBJECTS
        ):
            if len(body) > limits.QUICK_BYTES:
                await self._turns.take(held.client)
            return parse(*arguments)
        held.slow = True
        return await self._in_thread(held, parse, *arguments)

    async def _in_thread(self, held: Hold, function: Callable[..., T], *arguments: Any) -> T:
        if held.size - held.parsed > limits.LARGE_BYTES:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._large, _undisturbed, function, *arguments)
        async with self._pool_turns.turn(held.client):
            return await self._host.run(self._pool, held.client, _undisturbed, function, *arguments)

    def _parsed(
        self, body: bytearray | mmap, choose: Callable[[Any], type[B]], notes: Notes, made: Callable[[B], T]
    ) -> tuple[T, int]:
        """What `made` makes of it, and about the bytes that it takes in memory besides those that came."""
        value, counts = parse_counted(body, self._bounds)
        num_bytes = counts.containers * limits.CONTAINER_BYTES + (counts.values + counts.keys) * limits.VALUE_BYTES
        return made(checked(value, choose(value), notes)), num_bytes

    async def _body(self, request: Request, held: Hold, pace: Pace) -> bytearray | mmap:
        most = self._options.max_body_bytes
        too_large = HttpError(413, f"The body has more than {most} bytes.", "Send smaller media, or URLs.")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 19 or int(declared) > most):
            raise too_large
        body = ArrivingBody(int(declared) if declared.isdigit() else 0)
        async for chunk in request.stream():
            if len(body) + len(chunk) > most:
                raise too_large
            held.grow(len(chunk))
            pace.received(len(chunk))
            body.append(chunk)
        return body.whole()


def _undisturbed(parse: Callable[..., T], *arguments: Any) -> T:
    """Parse a body of perhaps many objects; the garbage collector would walk through those of all others."""
    with uncollected():
        return parse(*arguments)


def _check_headers(request: Request) -> None:
    headers = request.headers
    if (
        "content-type" not in headers
        and headers.get("content-length", "0") == "0"
        and "transfer-encoding" not in headers
    ):
        raise HttpError(400, "The request has no body.", "Send JSON with Content-Type: application/json.")
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, "The body must be JSON.", "Send it with Content-Type: application/json.")
    _check_encoding(request)


def _check_encoding(request: Request) -> None:
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "Compressed bodies are not accepted.", "Send it without Content-Encoding.")


def _parsed_form(body: bytearray | mmap, boundary: bytes, kind: type[B], notes: Notes) -> B:
    return checked(values_of(multipart.parse(body, boundary)), kind, notes)


def parse(body: bytes | bytearray | mmap, bounds: JsonBounds = limits.JSON) -> Any:
    """Parse strict JSON in UTF-8 without a byte order mark, with limits on depth and number of values.

    Raises:
        HttpError: 400.
    """
    value, _ = parse_counted(body, bounds)
    return value


def parse_counted(body: bytes | bytearray | mmap, bounds: JsonBounds) -> tuple[Any, JsonCounts]:
    """The same, and how many parts there are at most."""
    try:
        if len(body) > limits.LARGE_BYTES:
            with quick_turns():
                return piecewise_json.parse_counted(body, bounds)
        return bounded_json.parse_counted(str(body, "utf-8"), bounds)
    except (NotJsonError, UnicodeError) as error:
        raise _NOT_JSON from error
    except JsonError as error:
        raise HttpError(400, error.reason, error.remedy) from error


def checked(value: Any, kind: type[B], notes: Notes | None = None) -> B:
    """Check `value` against the schema `kind`.

    Raises:
        HttpError: 400, with the field at fault; for an unknown field also the nearest known one.
    """
    try:
        return kind.model_validate(value, context=notes)
    except ValidationError as error:
        raise validation_error(error, value) from None


__all__ = ["ClientDisconnect", "Reader", "checked", "parse"]
