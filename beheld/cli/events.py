"""Server-sent events as they come from a socket, cut anywhere."""

from __future__ import annotations

END = "[DONE]"


class EventReader:
    """Reads the data of events out of bytes.

    Only the bytes of line feed and carriage return end a line: texts may hold other characters that end lines, such as
    U+2028, and a character may come in two pieces.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> list[str]:
        """The data of the events that have become complete, those of several lines joined by line feeds."""
        *lines, rest = piece.split(b"\n")
        if not lines:
            self._held.append(piece)
            return []
        lines[0] = b"".join([*self._held, lines[0]])
        self._held = [rest]
        found: list[str] = []
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not name and self._data:
                found.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return found
