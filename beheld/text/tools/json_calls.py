"""Reads calls as consecutive JSON objects, {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import re
from collections.abc import Container

from beheld.text.marks import Enclosed, Seeker
from beheld.text.tools.call import Piece, call_from, keyed_call_from, parsed, printable

# The usual beginning of a call; after it and a quote, the arguments are passed on as they arrive.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{(?=\s*["}])'
)
# The same where the name is the key of the arguments.
_KEYED_HEAD = re.compile(r'\{\s*"([^"\\]+)"\s*:\s*\{(?=\s*["}])')
_MAX_HEAD = 256
# What may still become a call among words: a bracket, then a quoted key.
_HOPEFUL = re.compile(r'\{\s*(?:$|"(?:name|type|parameters|arguments)"|"[a-z]{0,10}$)')
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_BETWEEN = re.compile(r"[\s,;\[\]]*")


class Balance:
    """Finds the end of a bracketed text in pieces, ignoring brackets in quotes.

    Args:
        depth: number of brackets that are already open.
        quotes: the quote characters.
    """

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        # The brackets that close those which are open.
        self._closing = ["}"] * depth
        self._quote: str | None = None
        self._escaped = False
        self._outside = re.compile(rf"[{quotes}()\[\]{{}}]")
        self._inside = {quote: re.compile(rf"[{quote}\\]") for quote in quotes}

    def end(self, text: str) -> int | None:
        """The index after the bracket that closes the first one; None if it is not in this piece."""
        place = 0
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = (self._outside if self._quote is None else self._inside[self._quote]).search(text, place)
            if found is None:
                return None
            place = found.end()
            if self._take(found.group()):
                return place
        return None

    def _take(self, sign: str) -> bool:
        """Consume a character; True if it closes the last bracket."""
        if self._quote is not None:
            self._escaped = sign == "\\"
            self._quote = None if sign == self._quote else self._quote
        elif sign in self._inside:
            self._quote = sign
        else:
            if sign in _CLOSING:
                self._closing.append(_CLOSING[sign])
            elif self._closing:
                self._closing.pop()
            return not self._closing
        return False

    def missing(self) -> str:
        """The brackets that would close the text, unless it ends in quotes."""
        return "".join(reversed(self._closing)) if self._quote is None else ""


class JsonCall:
    """One call, from its opening bracket to its closing one.

    Args:
        names: the functions that may be called; None allows any.
        hasty: give up as soon as the first key is not a call's, so that the text around it is not held back.
        keyed: its one key is the function's name, and the value its arguments.
    """

    def __init__(self, names: Container[str] | None, *, hasty: bool = False, keyed: bool = False) -> None:
        self._names = names
        self._hasty = hasty
        self._head = _KEYED_HEAD if keyed else _HEAD
        self._read = keyed_call_from if keyed else call_from
        self._state = "head"
        self._held: list[str] = []
        self._num_held = 0
        self._balance = Balance()

    @property
    def begun(self) -> bool:
        """True once it is certain to be a call."""
        return self._state != "head"

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        """Add text; returns (pieces, the text after the call or None while it continues).

        If the call has not begun by its end, it is not a call.
        """
        pieces: list[Piece] = []
        if self._state == "head":
            left = self._look(text, pieces)
            if left is None or self._state != "arguments":
                return pieces, left
            text = left
        if self._state == "arguments":
            end = self._balance.end(text)
            pieces.append(Piece(None, text[:end]))
            if end is None:
                return pieces, None
            self._state, self._balance, text = "tail", Balance(depth=1), text[end:]
        end = self._balance.end(text)
        return pieces, None if end is None else text[end:]

    def missing(self) -> list[Piece]:
        """The brackets that the arguments lack."""
        text = self._balance.missing() if self._state == "arguments" else ""
        return [Piece(None, text)] if text else []

    def held(self) -> str:
        """The text of a call that has not begun."""
        return "".join(self._held)

    def _look(self, text: str, pieces: list[Piece]) -> str | None:
        """Examine the beginning of a call; returns the unprocessed rest, or None."""
        looked = self._num_held
        self._held.append(text)
        self._num_held += len(text)
        if looked < _MAX_HEAD:
            if len(self._held) > 1:
                self._held = ["".join(self._held)]
            found = self._head.match(self._held[0], 0, _MAX_HEAD)
            if found is not None and self._may(found[1]):
                pieces.append(Piece(printable(found[1]), ""))
                self._state, self._balance = "arguments", Balance()
                return self._held[0][found.end() - 1 :]
            if self._hasty and not _HOPEFUL.match(self._held[0]):
                text, self._held = self._held[0][1:], ["{"]
                return text
        end = self._balance.end(text)
        if end is None:
            return None
        self._held[-1] = self._held[-1][: len(self._held[-1]) - (len(text) - end)]
        try:
            whole = self._read(parsed("".join(self._held)))
        except ValueError:
            whole = []
        if whole and self._may(whole[0].name or ""):
            pieces += whole
            self._state = "done"
        return text[end:]

    def _may(self, name: str) -> bool:
        return self._names is None or name in self._names


class JsonCalls:
    """Calls with only whitespace, commas, semicolons and list brackets between them; a call.CallBody.

    After anything else, everything is text, or words among which further calls may stand.

    Args:
        names: the functions that may be called; None allows any.
        words: calls may also follow words, which this separates from what encloses calls.
        keyed: as JsonCall.
    """

    def __init__(
        self, names: Container[str] | None = None, *, words: Enclosed | None = None, keyed: bool = False
    ) -> None:
        self._names = names
        self._keyed = keyed
        self._anywhere = words is not None
        self._seeker = Seeker()
        self._words = Enclosed() if words is None else words
        self._call: JsonCall | None = None
        # Text between calls, or before the first.
        self._between: list[str] = []
        self._plain = False
        self._called = False

    @property
    def called(self) -> bool:
        """True once a call has begun."""
        return self._called

    @property
    def complete(self) -> bool:
        """As CallBody."""
        return self._call is None

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody."""
        shown: list[str] = []
        pieces: list[Piece] = []
        while text:
            if self._plain and not self._anywhere:
                shown.append(text)
                break
            if self._plain and self._call is None:
                before, mark, text = self._seeker.seek(text, "{")
                shown.append(self._words.push(before))
                if mark is None:
                    break
                self._call, text = JsonCall(self._names, hasty=True), mark + text
            left = self._outside(text) if self._call is None else self._within(text, shown, pieces)
            if left is None:
                break
            text = left
        return "".join(shown), pieces

    def end(self) -> tuple[str, list[Piece]]:
        """As CallBody. Some models close a call with its mark and forget a bracket."""
        words, pieces = self.cut()
        return words, pieces + ([] if self._call is None else self._call.missing())

    def cut(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        if self._plain and self._anywhere:
            words = self._words.rest()
            held = "" if self._call is None or self._call.begun else self._call.held()
            # Whitespace behind a call belongs neither to it nor to the words.
            return "" if self._called and not held and words.isspace() else words + held, []
        between, self._between = "".join(self._between), []
        if self._call is not None and not self._call.begun:
            return ("" if self._called else between) + self._call.held(), []
        return "" if self._called else between, []

    def _outside(self, text: str) -> str | None:
        found = _BETWEEN.match(text)
        assert found is not None
        self._between.append(found.group())
        text = text[found.end() :]
        if text.startswith("{"):
            self._call = JsonCall(self._names, keyed=self._keyed)
        elif text:
            return self._as_text(text)
        return text or None

    def _within(self, text: str, shown: list[str], pieces: list[Piece]) -> str | None:
        assert self._call is not None
        found, left = self._call.push(text)
        pieces += found
        if self._call.begun:
            self._words.part()
            self._called, self._plain = True, False
            self._between = []
        elif left is not None and self._plain:
            shown.append(self._words.push(self._call.held()))
        elif left is not None and self._anywhere:
            held = self._call.held()
            shown.append(self._words.push(self._as_text("") + held))
        elif left is not None:
            return self._as_text(self._call.held() + left)
        if left is not None:
            self._call = None
        return left

    def _as_text(self, text: str) -> str:
        self._plain, self._call = True, None
        # After a call, separators belong neither to a call nor to the text, but words around it stay apart.
        between, self._between = "".join(self._between), []
        if not self._called:
            return between + text
        return between[len(between.rstrip()) :] + text if self._anywhere else text
