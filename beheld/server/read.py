"""From a request's bytes to a checked object: admission, limits, then strict JSON, then the schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from beheld.server import limits
from beheld.server.admission import Admission, Hold
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.validation_errors import validation_error
from beheld.utils.pace import Pace, paced

B = TypeVar("B", bound=BaseModel)

_THREADS = 2


class Reader:
    """Reads bodies, and keeps what they cost from everybody else.

    A server that is full says so before it reads. What large bodies hold is counted, and they are parsed and checked in
    threads of their own, where the interpreter can turn to the event loop between two values.

    Args:
        admission: says whether anything more is taken.
        options: of the server.
        max_values: how many values one body may have.
    """

    def __init__(self, admission: Admission, options: ServerOptions, max_values: int = limits.MAX_VALUES) -> None:
        self._admission = admission
        self._options = options
        self._max_values = max_values
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="beheld-read")

    async def read(self, request: Request, kind: type[B], held: Hold) -> B:
        """The request's body as a `kind`; `held` counts it, for as long as whoever asks keeps any of it.

        Raises:
            HttpError: 400, 408, 413, 415 or 503, naming the field where one can be named.
            ClientDisconnect: the client went away.
        """
        self._admission.check()
        _check_headers(request)
        first_s, most_s = self._options.body_s, self._options.body_most_s
        try:
            async with paced(first_s, most_s) as pace:
                body = await self._body(request, held, pace)
        except TimeoutError as error:
            raise HttpError(
                408,
                f"The body did not arrive: too little came in {first_s:g} seconds, or not all in {most_s:g}.",
                "Send it faster, or send less.",
            ) from error
        if len(body) <= limits.INLINE_BYTES:
            return self._made(body, kind)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._made, body, kind)

    def _made(self, body: bytearray, kind: type[B]) -> B:
        return checked(parse(body, self._max_values), kind)

    async def _body(self, request: Request, held: Hold, pace: Pace) -> bytearray:
        most = self._options.max_body_bytes
        too_large = HttpError(413, f"The body has more than {most} bytes.", "Send smaller media, or URLs.")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 19 or int(declared) > most):
            raise too_large
        # One growing piece of memory, which goes back to the system as a whole.
        body = bytearray()
        async for chunk in request.stream():
            if len(body) + len(chunk) > most:
                raise too_large
            held.grow(len(chunk))
            pace.came(len(chunk))
            body += chunk
        return body


def _check_headers(request: Request) -> None:
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, "The body must be JSON.", "Send it with Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "Compressed bodies are not accepted.", "Send it without Content-Encoding.")


def parse(body: bytes | bytearray, max_values: int = limits.MAX_VALUES) -> Any:
    """Strict JSON: UTF-8 without a byte order mark, no NaN, no duplicate keys, bounded in depth and number, whole
    characters.

    Raises:
        HttpError: 400.
    """
    _count(body, max_values)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_whole_number,
            parse_float=_fraction,
        )
    except HttpError:
        raise
    except RecursionError as error:
        raise HttpError(400, "The JSON is nested too deeply.", f"Nest at most {limits.MAX_DEPTH} deep.") from error
    except (ValueError, UnicodeError) as error:
        raise HttpError(
            400, "The body is not valid JSON in UTF-8.", "Send one JSON object, without a byte order mark."
        ) from error
    _check(value)
    return value


def _count(body: bytes | bytearray, max_values: int) -> None:
    """Refuse what has too many parts before anything is made of them.

    Outside of texts a colon belongs to a key, a comma stands between two values and a bracket opens a container; so
    what is counted are these marks, first everywhere (most bodies hold few), then outside of texts alone.
    """
    counted = (
        (b":", limits.MAX_KEYS, "keys"),
        (b",", max_values, "values"),
        (b"[{", limits.MAX_CONTAINERS, "lists and objects"),
    )

    def excess(text: bytes | bytearray) -> Iterator[HttpError]:
        for marks, most, what in counted:
            if sum(text.count(mark) for mark in marks) > most:
                yield HttpError(400, f"The body has more than {most} {what}.", "Send several smaller requests.")

    if next(excess(body), None) is None:
        return
    # Of an escaped character nothing is left that could end a text; then every second piece between quotes is text.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * (max_values + limits.MAX_KEYS):
        raise HttpError(400, "The body has too many texts.", "Send several smaller requests.")
    for error in excess(b"".join(bare.split(b'"')[::2])):
        raise error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise HttpError(400, "The JSON has an object in which a key occurs twice.", "Say it once.")
    return made


def _constant(name: str) -> Any:
    raise HttpError(400, f"{name} is not a number of JSON.", "Send a finite number.")


def _whole_number(digits: str) -> int:
    """A function of Python's, unlike `int` itself: between two numbers other threads may run."""
    if len(digits) > limits.MAX_DIGITS:
        raise HttpError(400, f"A number has more than {limits.MAX_DIGITS} digits.", "Send a smaller one.")
    return int(digits)


def _fraction(digits: str) -> float:
    return float(digits)


def _check(value: Any) -> None:
    """Depth, and no half of a surrogate pair: it is no character, and no tokenizer takes it."""
    level = [value]
    for _ in range(limits.MAX_DEPTH):
        deeper: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                deeper += entry.keys()
                deeper += entry.values()
            elif isinstance(entry, list):
                deeper += entry
            elif isinstance(entry, str) and not entry.isascii() and not _whole(entry):
                raise HttpError(400, "A text holds half of a surrogate pair.", "Send whole characters.")
        if not deeper:
            return
        level = deeper
    raise HttpError(400, f"The JSON is nested more than {limits.MAX_DEPTH} deep.", "Nest it less.")


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked(value: Any, kind: type[B]) -> B:
    """`value` as a `kind`.

    Raises:
        HttpError: 400, naming the field, and the nearest known one where the field is unknown.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise validation_error(error, value) from None


__all__ = ["ClientDisconnect", "Reader", "checked", "parse"]
