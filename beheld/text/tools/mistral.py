"""Reads calls after [TOOL_CALLS] in Mistral's format: a list of JSON calls, or a name and its arguments."""

from __future__ import annotations

from beheld.text.marks import Seeker
from beheld.text.tools.call import NAME, Piece
from beheld.text.tools.json_calls import Balance, JsonCalls

MARK = "[TOOL_CALLS]"
_ENDS = {
    "name": {"[ARGS]": "open", "[CALL_ID]": "id", "{": "arguments"},
    "id": {"[ARGS]": "open", "{": "arguments"},
    "open": {"{": "arguments"},
}


class MistralCalls:
    """The text after one mark; a call.CallBody."""

    def __init__(self) -> None:
        self._list: JsonCalls | None = None
        self._state = "start"
        self._seeker = Seeker()
        self._raw: list[str] = []
        self._name: list[str] = []
        self._balance = Balance()

    @property
    def called(self) -> bool:
        """True once a call has begun."""
        return self._state in ("arguments", "done") if self._list is None else self._list.called

    @property
    def complete(self) -> bool:
        """As CallBody."""
        return self._state != "arguments" if self._list is None else self._list.complete

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody."""
        if self._state == "start":
            solid = text.lstrip()
            if not solid:
                self._raw.append(text)
                return "", []
            if solid[0] in "[{":
                self._list = JsonCalls()
                text, self._raw = "".join([*self._raw, text]), []
            self._state = "name"
        if self._list is not None:
            return self._list.push(text)
        pieces: list[Piece] = []
        while text and self._state in _ENDS:
            text = self._look(text, pieces)
        if self._state == "arguments":
            end = self._balance.end(text)
            if text:
                pieces.append(Piece(None, text[:end]))
            if end is None:
                return "", pieces
            self._state, text = "done", text[end:]
        return text, pieces

    def end(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        if self._list is not None:
            return self._list.cut()
        raw, self._raw = "".join(self._raw) + self._seeker.rest(), []
        return raw, []

    cut = end

    def _look(self, text: str, pieces: list[Piece]) -> str:
        """Consume text up to the next mark; returns the unprocessed rest.

        The rest is text if the state is then "plain".
        """
        ends = _ENDS[self._state]
        before, mark, after = self._seeker.seek(text, ends)
        self._raw += (before, mark or "")
        if self._state == "name":
            self._name.append(before)
        elif self._state == "open" and before.strip():
            return self._as_text(after)
        if mark is None:
            return ""
        name = "".join(self._name).strip()
        if not NAME.fullmatch(name):
            return self._as_text(after)
        self._state = ends[mark]
        if self._state != "arguments":
            return after
        pieces.append(Piece(name, ""))
        self._raw = []
        return "{" + after

    def _as_text(self, text: str) -> str:
        self._state = "plain"
        raw, self._raw = "".join(self._raw), []
        return raw + text
