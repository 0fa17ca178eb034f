"""Reads calls that are the whole answer: one or several JSON objects, or calls in Python syntax."""

from __future__ import annotations

import re
from collections.abc import Container

from beheld.text.marks import BLOCK, Beginning, Enclosed
from beheld.text.tools.call import NAME, CallBody, Piece, Schemas, json_text
from beheld.text.tools.json_calls import Balance, JsonCalls
from beheld.text.tools.literal import keywords_of, unescaped_keywords_of

_FENCE = "```"
_JSON_MARKS = ("<|python_tag|>", _FENCE + "json", _FENCE)
_PYTHON_MARKS = ("<|python_start|>", "<|python_tag|>", _FENCE + "python", _FENCE)
_XML = "<tool_call>", "</tool_call>"
_PYTHON_END = "<|python_end|>"
_BRACKET = re.compile(r"[{}]")
_BETWEEN = re.compile(r"[\s,]*")


class BareReader:
    """Reads an answer that begins with a call, or with a mark and a call; see call.ToolReader.

    Any other answer is text.

    Args:
        body: reads the calls.
        marks: marks that may precede them.
    """

    def __init__(self, body: CallBody, marks: tuple[str, ...]) -> None:
        self._body = body
        self._beginning: Beginning | None = Beginning(*marks)
        # Whitespace and mark at the beginning; they are text if no call follows.
        self._undecided = ""
        self._marked = False
        self._behind: list[str] = []

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As ToolReader."""
        if self._beginning is not None:
            found = self._beginning.push(text)
            if found is None:
                return "", []
            blanks, mark, text = found
            self._beginning, self._undecided, self._marked = None, blanks + mark, bool(mark)
        shown: list[str] = []
        pieces: list[Piece] = []
        place = 0
        while place < len(text):
            stop = self._stop(text, place)
            words, found_pieces = self._body.push(text[place:stop])
            place = stop
            shown.append(self._shown(words))
            pieces += found_pieces
        return "".join(shown), pieces

    def _stop(self, text: str, place: int) -> int:
        """Where the part of a text that is read next ends.

        While it is not known what follows the undecided text, words or a call, no part may hold both. A call begins
        and ends with a bracket.
        """
        if self._undecided and not self._body.called:
            found = _BRACKET.search(text, place, place + BLOCK)
            if found is not None:
                return found.end()
        return place + BLOCK

    def finish(self) -> tuple[str, list[Piece]]:
        """As ToolReader."""
        if self._beginning is not None:
            return self._beginning.rest(), []
        words, pieces = self._body.cut()
        shown = self._shown(words)
        if not self._body.called:
            return self._undecided + shown, pieces
        # The closing counterpart of the mark before the calls.
        behind = "".join(self._behind)
        for mark in (_FENCE, _PYTHON_END):
            behind = behind.lstrip().removeprefix(mark) if behind.lstrip().startswith(mark) else behind
        return shown + (behind if behind.strip() else ""), pieces

    def _shown(self, words: str) -> str:
        if self._body.called:
            self._undecided = ""
            if self._marked:
                self._behind.append(words)
                return ""
        elif words:
            # A mark before words is one of them, and encloses no call.
            words, self._undecided, self._marked = self._undecided + words, "", False
        return words


class PythonCalls:
    """A list of calls in Python syntax: [look(at="sky"), wait(seconds=3)]; a call.CallBody.

    A call is returned when it is complete.

    Args:
        names: the functions that may be called.
        listed: brackets surround the calls; without them, each may stand on a line of its own.
    """

    def __init__(self, names: Container[str], *, listed: bool = True) -> None:
        self._names = names
        self._state = "start" if listed else "between"
        self._raw: list[str] = []
        self._held: list[str] = []
        self._balance = Balance(quotes="\"'")
        self._called = False

    @property
    def called(self) -> bool:
        """True once a call has begun."""
        return self._called

    @property
    def complete(self) -> bool:
        """As CallBody."""
        return self._state != "call"

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody."""
        pieces: list[Piece] = []
        while text and self._state != "plain":
            text = self._within(text, pieces) if self._state == "call" else self._outside(text)
        return text, pieces

    def end(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        raw = "".join([*([] if self._called else self._raw), *self._held])
        self._raw, self._held = [], []
        return raw, []

    cut = end

    def _outside(self, text: str) -> str:
        """Consume text before, between or after the calls; returns the unprocessed rest."""
        if self._state == "start":
            solid = text.lstrip()
            self._raw.append(text[: len(text) - len(solid)])
            if solid and solid[0] != "[":
                return self._as_text(solid)
            if solid:
                self._raw.append("[")
                self._state = "between"
            return solid[1:]
        found = _BETWEEN.match(text)
        assert found is not None
        self._raw.append(found.group())
        text = text[found.end() :]
        if text.startswith("]") and self._called:
            self._state, self._raw = "plain", []
            return text[1:]
        if text:
            self._state, self._balance = "call", Balance(quotes="\"'")
        return text

    def _within(self, text: str, pieces: list[Piece]) -> str:
        end = self._balance.end(text)
        self._held.append(text[:end])
        if end is None:
            return ""
        written, self._held = "".join(self._held), []
        call = _call(written)
        if call is None or call.name not in self._names:
            return self._as_text(written + text[end:])
        pieces.append(call)
        self._called, self._state, self._raw = True, "between", []
        return text[end:]

    def _as_text(self, text: str) -> str:
        self._state = "plain"
        raw, self._raw = "" if self._called else "".join(self._raw), []
        return raw + text


def _call(text: str) -> Piece | None:
    name, bracket, rest = text.partition("(")
    if not bracket or not rest.endswith(")") or not NAME.fullmatch(name.strip()):
        return None
    for read in (keywords_of, unescaped_keywords_of):
        try:
            return Piece(name.strip(), json_text(read(rest[:-1])))
        except ValueError:
            pass
    return None


def worded_json_reader(schemas: Schemas) -> BareReader:
    """A reader of calls in JSON, alone or among words, restricted to the known functions."""
    return BareReader(JsonCalls(schemas, words=Enclosed()), _JSON_MARKS)


def json_reader(schemas: Schemas) -> BareReader:
    """A reader of one or several calls in JSON, restricted to the known functions."""
    return BareReader(JsonCalls(schemas), _JSON_MARKS)


def listed_json_reader(schemas: Schemas) -> BareReader:
    """The same of calls that xLAM's models write, which may also stand among words: in lists, fences and tags."""
    pairs = {_FENCE + "json": _FENCE, _FENCE: _FENCE, "[TOOL_CALLS]": None, _XML[0]: _XML[1], "[": None}
    return BareReader(JsonCalls(schemas, words=Enclosed(pairs)), ())


def python_reader(schemas: Schemas) -> BareReader:
    """A reader of calls in Python syntax, restricted to the known functions."""
    return BareReader(PythonCalls(schemas), _PYTHON_MARKS)
