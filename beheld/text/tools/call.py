"""Pieces of tool calls, and the protocol of their readers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

# Function name -> JSON schema of its arguments.
Schemas = Mapping[str, Mapping[str, Any]]
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Piece:
    """A piece of a call.

    Attributes:
        name: the function's name at the beginning of a call; None continues the previous call.
        arguments: text to append to the arguments, which are JSON if the model wrote them correctly.
        id: the model's own id of the call, if it wrote one.
    """

    name: str | None
    arguments: str
    id: str | None = None


class ToolReader(Protocol):
    """Reads calls from a text that arrives in pieces, for any division into pieces.

    It never fails: whatever does not begin like a call is text. The time is linear in the text for any number of
    pieces.
    """

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """Add text; returns what is now certain: (plain text, pieces of calls)."""

    def finish(self) -> tuple[str, list[Piece]]:
        """The rest."""


class CallBody(Protocol):
    """Reads the text after an opening mark."""

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """Add text; returns what is now certain: (plain text after the calls, pieces of calls)."""

    def end(self) -> tuple[str, list[Piece]]:
        """The rest at a closing mark; whatever is not a call is plain text."""

    def cut(self) -> tuple[str, list[Piece]]:
        """The rest when the text ends without a closing mark."""

    @property
    def called(self) -> bool:
        """True once a call has begun."""

    @property
    def complete(self) -> bool:
        """True if no call is open whose arguments may hold the text that follows."""


class WholeCall:
    """A call that is read when all of it is there; a CallBody, for readers that say how one is read."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self.called = False
        self.complete = True

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody."""
        self._held.append(text)
        return "", []

    def end(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        return self._whole(cut=False)

    def cut(self) -> tuple[str, list[Piece]]:
        """As CallBody. The arguments stay open, so that no one takes them for complete ones."""
        return self._whole(cut=True)

    def _whole(self, *, cut: bool) -> tuple[str, list[Piece]]:
        text, self._held = "".join(self._held), []
        found = self._read(text, cut=cut)
        if found is None:
            return text, []
        self.called = True
        return "", [found]

    def _read(self, text: str, *, cut: bool) -> Piece | None:
        """The call, or None if the text is none; with `cut`, it may end anywhere."""
        raise NotImplementedError


def call_from(value: Any) -> list[Piece]:
    """A call from parsed JSON; empty if it is not a call.

    "tool_name" and "parameters" are aliases of "name" and "arguments".

    Raises:
        ValueError: as json_text.
    """
    if not isinstance(value, dict):
        return []
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or not name:
        return []
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json_text(arguments)
    return [Piece(printable(name), printable(arguments))] if isinstance(arguments, str) else []


def keyed_call_from(value: Any) -> list[Piece]:
    """A call whose name is the key of its arguments, as call_from.

    Raises:
        ValueError: as json_text.
    """
    name, arguments = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    return [Piece(printable(name), json_text(arguments))] if name and isinstance(arguments, dict) else []


def calls_of(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins pieces into whole calls."""
    made: list[Piece] = []
    for piece in pieces:
        if piece.name is not None:
            made.append(piece)
        else:
            made[-1] = replace(made[-1], arguments=made[-1].arguments + piece.arguments)
    return made


def json_text(value: Any) -> str:
    """JSON with characters unescaped and lone surrogates removed.

    Raises:
        ValueError: the value is not JSON or is nested too deeply.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return text if text.isascii() or printable(text) == text else json.dumps(value)


def printable(text: str) -> str:
    """The text without lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def parsed(text: str) -> Any:
    """Parse strict JSON.

    Raises:
        ValueError: the text is not JSON or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_no_json)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
