"""Parsing of server-sent events from bytes that may be cut anywhere, and of OpenAI chunks in them."""

from __future__ import annotations

import json
from typing import Any

from beheld.cli.terminal import shown

END = "[DONE]"
# Longest line in bytes: log-probabilities of prompts make the longest chunks.
MAX_LINE = 64 << 20


class EventReader:
    """Extracts the data of events from bytes.

    Only line feeds and carriage returns end a line: text may hold other line separators, such as U+2028, and a
    character may be split over two reads.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> list[str]:
        """Return the data of the events that are now complete; several data lines are joined by line feeds.

        Raises:
            ValueError: a line exceeds MAX_LINE.
        """
        *lines, rest = piece.split(b"\n")
        if not lines:
            self._held.append(piece)
            self._size += len(piece)
            if self._size > MAX_LINE:
                raise ValueError("a line has no end")
            return []
        lines[0] = b"".join([*self._held, lines[0]])
        self._held, self._size = [rest], len(rest)
        found: list[str] = []
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not name and self._data:
                found.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return found


def chunk_of(data: str) -> dict[str, Any]:
    """Parse and validate one chunk of OpenAI's API: an `error` object, or `choices` with a `delta` each.

    Raises:
        ValueError: the data is not such a chunk.
    """
    try:
        chunk = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(chunk, dict):
        raise ValueError("no object")
    if chunk.get("error"):
        details = chunk["error"] if isinstance(chunk["error"], dict) else {"message": chunk["error"]}
        return {"error": {name: shown(str(value)) for name, value in details.items() if value is not None}}
    for choice in chunk["choices"] if isinstance(chunk.get("choices"), list) else [None]:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict) or not isinstance(delta.get("content") or "", str):
            raise ValueError("no choices")
    usage = chunk.get("usage")
    if usage is not None and not (
        isinstance(usage, dict)
        and all(isinstance(usage.get(f"{which}_tokens"), int) for which in ("prompt", "completion"))
        and isinstance(usage.get("prompt_tokens_details") or {}, dict)
    ):
        raise ValueError("no usage")
    return chunk
