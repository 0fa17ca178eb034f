"""The items of a job: lines of a file in OpenAI's batch format, or media files with one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from beheld.core.errors import ConfigError, first_line
from beheld.jobs.remote import without_key
from beheld.server.errors import HttpError
from beheld.server.pooling_routes import POOLING_ROUTES
from beheld.server.read import parse

# The routes that a line may name.
URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/audio/transcriptions"),
    *("/v1/audio/translations", *(path for path, _ in POOLING_ROUTES)),
)
MAX_LINE_BYTES = 128 << 20
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


# Of lines that have not the form of one; others are requests that are not answered here.
MALFORMED = frozenset({"invalid_json_line", "missing_custom_id", "unknown_field", "too_large"})


@dataclass(frozen=True)
class Item:
    """One request of a job.

    Attributes:
        line: its line in the input, from 1.
        custom_id: the user's name for it.
        url: the server's route.
        body: the request's JSON.
        position: bytes of the input up to its end, for the progress.
    """

    line: int
    custom_id: str
    url: str
    body: bytes
    position: int = 0


@dataclass(frozen=True)
class BadLine:
    """A line that is no request.

    Attributes:
        line: its number, from 1.
        code: a code that programs may test.
        message: what is wrong, and what to do.
        position: as `Item.position`.
        custom_id: the line's own, if it has one.
    """

    line: int
    code: str
    message: str
    position: int = 0
    custom_id: str | None = None


def read_items(source: Path | str, open_: Callable[[], BinaryIO] | None = None) -> Iterator[Item | BadLine]:
    """Yield what each line of a file asks for; empty lines are skipped. One line is in memory at a time.

    Args:
        open_: opens a file that is not one of this machine.

    Raises:
        ConfigError: the file cannot be read.
    """
    position = 0
    try:
        with Path(source).open("rb") if open_ is None else open_() as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                position += len(line)
                if len(line) > MAX_LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                        position += len(line)
                    yield BadLine(number, "too_large", f"The line has more than {MAX_LINE_BYTES} bytes.", position)
                elif line.strip():
                    yield _item(line, number, position)
    except OSError as error:
        words = f"The input {str(source)!r} cannot be read: {error.strerror or first_line(error)}."
        raise ConfigError(
            words if open_ is None else without_key(words),
            "Name a file of JSON lines.",
        ) from error


def _item(line: bytes, number: int, position: int) -> Item | BadLine:
    def bad(code: str, message: str, custom_id: str | None = None) -> BadLine:
        return BadLine(number, code, message, position, custom_id)

    try:
        asked = parse(line.strip())
    except HttpError as error:
        return bad("invalid_json_line", f"{error.reason} {error.remedy}".replace("The body", "The line"))
    if not isinstance(asked, dict):
        return bad("invalid_json_line", "The line is not a JSON object.")
    custom_id = asked.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return bad("missing_custom_id", "The line needs a custom_id, a text that no other line has.")
    unknown = sorted(set(asked) - _FIELDS)
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        return bad("unknown_field", f"The line has an unknown field {unknown[0][:64]!r}. Known: {known}.", custom_id)
    if asked.get("method") != "POST":
        return bad("invalid_method", 'The method must be "POST".', custom_id)
    if asked.get("url") not in URLS:
        return bad("invalid_url", f"The url must be one of {', '.join(URLS)}.", custom_id)
    body = asked.get("body")
    if not isinstance(body, dict):
        return bad("invalid_body", "The body must be a JSON object.", custom_id)
    if body.get("stream"):
        return bad("invalid_body", "The answers of a job are not streamed. Leave stream out.", custom_id)
    return Item(number, custom_id, asked["url"], json.dumps(body).encode(), position)


def media_items(
    files: Iterable[tuple[str, str, Path]], prompt: str, options: dict[str, Any]
) -> Iterator[Item | BadLine]:
    """Yield one chat request per media file.

    Args:
        files: for each, its custom_id, its modality (image, video, audio) and where it is.
        prompt: the question about each.
        options: further fields of every request.
    """
    for number, (name, modality, path) in enumerate(files, 1):
        kind = f"{modality}_url"
        parts = [{"type": kind, kind: {"url": path.resolve().as_uri()}}, {"type": "text", "text": prompt}]
        body = {"messages": [{"role": "user", "content": parts}], **options}
        yield Item(number, name, "/v1/chat/completions", json.dumps(body).encode())
