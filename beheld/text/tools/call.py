"""A tool call as it was read out of a text, and what a reader of such texts is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Call:
    """A call: the function's name, and its arguments as JSON in a text."""

    name: str
    arguments: str


class ToolReader(Protocol):
    """Reads calls out of a text that comes in pieces; how it is cut does not matter. It never fails: what cannot be
    read as a call is text."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """What has become certain: (plain text, calls)."""

    def finish(self) -> tuple[str, list[Call]]:
        """The rest."""


def call_of(text: str) -> Call | None:
    """A call from {"name": ..., "arguments": {...}}; "parameters" is read as "arguments". None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return call_from(value)


def call_from(value: Any) -> Call | None:
    """A call from parsed JSON; None if it is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
