"""From a request's bytes to a checked object: limits first, then strict JSON, then the schema."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from beheld.core.params import nearest
from beheld.server.errors import HttpError

B = TypeVar("B", bound=BaseModel)

MAX_DEPTH = 64
# Keys and list entries: parsing many small things takes far longer than parsing few large ones.
MAX_KEYS = 50_000
MAX_ENTRIES = 4_000_000
_SILENCE_S = 0.1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


async def read(request: Request, kind: type[B], max_bytes: int, seconds: float) -> B:
    """The request's body as a `kind`.

    Raises:
        HttpError: 400, 408, 413 or 415, naming the field where one can be named.
        ClientDisconnect: the client went away.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, "The body must be JSON.", "Send it with Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "Compressed bodies are not accepted.", "Send it without Content-Encoding.")
    try:
        async with asyncio.timeout(seconds):
            body = await _body(request, max_bytes)
    except TimeoutError as error:
        raise HttpError(
            408, f"The body did not arrive within {seconds:g} seconds.", headers={"Connection": "close"}
        ) from error
    return checked(parse(body), kind)


async def _body(request: Request, max_bytes: int) -> bytes:
    too_large = HttpError(
        413,
        f"The body has more than {max_bytes} bytes.",
        "Send smaller media, or URLs.",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 19 or int(declared) > max_bytes):
        await _discard(request, max_bytes)
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            chunks.clear()
            await _discard(request, max_bytes)
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


async def _discard(request: Request, max_bytes: int) -> None:
    """Let a client go on sending for a moment: one that is cut off while it sends does not read why."""
    size = 0
    while size <= max_bytes:
        try:
            message = await asyncio.wait_for(request.receive(), _SILENCE_S)
        except TimeoutError:
            return
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
        size += len(message.get("body", b""))


def parse(body: bytes) -> Any:
    """Strict JSON: UTF-8 without a byte order mark, no NaN, no duplicate keys, bounded depth, whole characters.

    Raises:
        HttpError: 400.
    """
    # Quotes before colons are keys, unless the quote is escaped and so part of a text.
    if body.count(b'":') - body.count(b'\\":') > MAX_KEYS or body.count(b",") > MAX_ENTRIES:
        raise HttpError(400, "The body has too many parts.")
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant)
    except HttpError:
        raise
    except RecursionError as error:
        raise HttpError(400, "The JSON is nested too deeply.") from error
    except (ValueError, UnicodeError) as error:
        raise HttpError(400, "The body is not valid JSON in UTF-8.") from error
    _check(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise HttpError(400, "The JSON has an object in which a key occurs twice.")
    return made


def _constant(name: str) -> Any:
    raise HttpError(400, f"{name} is not a number of JSON.")


def _check(value: Any) -> None:
    """Depth, and no half of a surrogate pair: it is no character, and no tokenizer takes it."""
    level = [value]
    for _ in range(MAX_DEPTH):
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
    raise HttpError(400, f"The JSON is nested more than {MAX_DEPTH} deep.")


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
        raise _refusal(error, kind) from None


def _refusal(error: ValidationError, kind: type[BaseModel]) -> HttpError:
    """The error that lies deepest: where forms are alternatives, the one that came furthest was meant."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    chosen = max(found, key=lambda entry: (len(entry["loc"]), entry["type"] == "extra_forbidden"))
    path = [part for part in chosen["loc"] if isinstance(part, int) or _NAME.fullmatch(part)]
    param = ".".join(map(str, path)) or None
    if chosen["type"] == "extra_forbidden":
        name = str(chosen["loc"][-1])[:64]
        known = {f.alias or n for n, f in kind.model_fields.items()} if len(chosen["loc"]) == 1 else ()
        return HttpError(
            400, f"The field {name!r} is not known here.", nearest(name, known), param=param, code="unknown_field"
        )
    message = chosen["msg"].removeprefix("Value error, ").rstrip(".")
    return HttpError(400, f"{param or 'The body'}: {message}.", param=param, code="invalid_value")


__all__ = ["ClientDisconnect", "checked", "parse", "read"]
