"""Tool calls as they are read out of a text, piece by piece, and what a reader of such texts is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# The function's name -> the JSON schema of its arguments.
Schemas = Mapping[str, Mapping[str, Any]]
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Piece:
    """A piece of a call.

    Attributes:
        name: of the function, where the call begins; None goes on with the call before.
        arguments: what is added to the arguments' text, which is JSON if the model wrote all of it well.
    """

    name: str | None
    arguments: str


class ToolReader(Protocol):
    """Reads calls out of a text that comes in pieces; how it is cut does not matter. It never fails: what does not
    begin as a call is text. Time is linear in the text, in however many pieces it comes."""

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """What has become certain: (plain text, pieces of calls)."""

    def finish(self) -> tuple[str, list[Piece]]:
        """The rest."""


class CallBody(Protocol):
    """Reads what stands behind an opening mark."""

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """What has become certain: (plain text behind the calls, pieces of calls)."""

    def end(self) -> tuple[str, list[Piece]]:
        """A closing mark has come: the rest, where plain text is what is no call."""

    def cut(self) -> tuple[str, list[Piece]]:
        """The text has ended without a closing mark: the rest."""

    @property
    def called(self) -> bool:
        """True once a call has begun."""


def call_from(value: Any) -> list[Piece]:
    """A call from parsed JSON, "parameters" being read as "arguments"; empty if it is not one.

    Raises:
        ValueError: as json_text.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return []
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json_text(arguments)
    return [Piece(printable(value["name"]), printable(arguments))] if isinstance(arguments, str) else []


def calls_of(pieces: Sequence[Piece]) -> list[Piece]:
    """Whole calls, from their pieces."""
    made: list[Piece] = []
    for piece in pieces:
        if piece.name is not None:
            made.append(piece)
        else:
            made[-1] = Piece(made[-1].name, made[-1].arguments + piece.arguments)
    return made


def json_text(value: Any) -> str:
    """JSON in words as they are, but for halves of characters, which no text can hold.

    Raises:
        ValueError: it holds what JSON does not know, or it is nested too deep.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return text if text.isascii() or printable(text) == text else json.dumps(value)


def printable(text: str) -> str:
    """The text without halves of characters."""
    return text.encode("utf-8", "replace").decode()


def parsed(text: str) -> Any:
    """The value of strict JSON.

    Raises:
        ValueError: it is none, or it is nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_no_json)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
