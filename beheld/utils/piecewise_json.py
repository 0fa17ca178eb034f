"""Strict JSON of large bodies, read in small steps between which other threads run.

The standard library decodes 60 MB of UTF-8 in one step of 90 ms, and reads one text as long in one of 170 ms; meanwhile
no other thread has the interpreter. Here every step looks at no more than a window of bytes. Only to widen a text, when
its first wide character comes, is a longer step, so the memory of a text is bounded.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from mmap import mmap
from typing import Any

from beheld.utils import bounded_json
from beheld.utils.bounded_json import JsonBounds, JsonCounts, JsonError, NotJsonError

# Bytes that one step looks at.
_WINDOW = 256 << 10
# Of a number, with all of its fraction.
_MAX_NUMBER = 4096
# Memory that a text may take although its bytes take less: one wide character makes all of a text's characters wide.
MAX_TEXT_BYTES = 64 << 20
_BLANKS = re.compile(rb"[ \t\n\r]*+")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][-+]?[0-9]++)?")
_WORD = re.compile(rb"true|false|null|NaN|-?Infinity")
_WORDS = {b"true": True, b"false": False, b"null": None}
# A key is hashed in one step, and no name of a field or of anything else is so long.
MAX_KEY_BYTES = 1 << 20
# What lies of a text before its end; never half of an escape.
_TEXT = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*+')


def parse(body: bytes | bytearray | mmap, bounds: JsonBounds) -> Any:
    """What `bounded_json.parse` gives of the decoded body.

    Raises:
        JsonError: it is no JSON in UTF-8, or holds too much.
    """
    value, _ = parse_counted(body, bounds)
    return value


def parse_counted(body: bytes | bytearray | mmap, bounds: JsonBounds) -> tuple[Any, JsonCounts]:
    """What `bounded_json.parse_counted` gives of the decoded body.

    Raises:
        JsonError: it is no JSON in UTF-8, or holds too much.
    """
    reader = _PieceReader(body, bounds)
    try:
        value = reader.value(reader.skip_blanks(0), 0)
    except UnicodeDecodeError as error:
        raise NotJsonError from error
    if reader.skip_blanks(reader.end) != len(body):
        raise NotJsonError
    bounded_json.check(value, bounds)
    return value, reader.counts


class _PieceReader:
    """Reads the values of a body.

    Attributes:
        end: where the last value ended.
    """

    def __init__(self, body: bytes | bytearray | mmap, bounds: JsonBounds) -> None:
        self._body = body
        self._bounds = bounds
        self._keys_left = bounds.keys
        self._containers_left = bounds.containers
        self._values_left = bounds.values
        self.end = 0

    @property
    def counts(self) -> JsonCounts:
        """The parts that were read."""
        left, bounds = (self._keys_left, self._containers_left, self._values_left), self._bounds
        return JsonCounts(bounds.keys - left[0], bounds.containers - left[1], bounds.values - left[2])

    def skip_blanks(self, start: int) -> int:
        """The first place from `start` on that holds no blank."""
        while True:
            stop = _end(_BLANKS, self._body, start, start + _WINDOW)
            if stop < start + _WINDOW:
                return stop
            start = stop

    def value(self, start: int, depth: int) -> Any:
        """The value that begins at `start`, within `depth` containers."""
        first = self._body[start : start + 1]
        if first == b'"':
            return self._text(start + 1)
        if first in (b"[", b"{"):
            self._containers_left -= 1
            if self._containers_left < 0:
                raise bounded_json.too_many(self._bounds.containers, "lists and objects")
            if depth == self._bounds.depth:
                raise bounded_json.too_deep(self._bounds)
            if first == b"[":
                return [self.value(place, depth + 1) for place in self._entries(start + 1, b"]")]
            return bounded_json.whole_object(
                [(self._key(place), self._member(depth + 1)) for place in self._entries(start + 1, b"}")]
            )
        word = _WORD.match(self._body, start, start + _WINDOW)
        if word is None:
            return self._number(start)
        self.end = word.end()
        return _WORDS[word[0]] if word[0] in _WORDS else bounded_json.refuse_constant(word[0].decode("ascii"))

    def _entries(self, start: int, closing: bytes) -> Iterator[int]:
        """Where each entry of a container begins; the caller reads one before it asks for the next."""
        place = self.skip_blanks(start)
        if self._body[place : place + 1] == closing:
            self.end = place + 1
            return
        while True:
            yield place
            place = self.skip_blanks(self.end)
            mark = self._body[place : place + 1]
            if mark == closing:
                self.end = place + 1
                return
            if mark != b",":
                raise NotJsonError
            self._values_left -= 1
            if self._values_left < 0:
                raise bounded_json.too_many(self._bounds.values, "values")
            place = self.skip_blanks(place + 1)

    def _key(self, start: int) -> str:
        if self._body[start : start + 1] != b'"':
            raise NotJsonError
        self._keys_left -= 1
        if self._keys_left < 0:
            raise bounded_json.too_many(self._bounds.keys, "keys")
        return self._text(start + 1, MAX_KEY_BYTES)

    def _member(self, depth: int) -> Any:
        """The value that belongs to the key that was just read."""
        place = self.skip_blanks(self.end)
        if self._body[place : place + 1] != b":":
            raise NotJsonError
        return self.value(self.skip_blanks(place + 1), depth)

    def _number(self, start: int) -> int | float:
        found = _NUMBER.match(self._body, start, start + _MAX_NUMBER)
        if found is None:
            raise NotJsonError
        self.end = found.end()
        if self.end == start + _MAX_NUMBER:
            raise bounded_json.too_many_digits(_MAX_NUMBER)
        digits = found[0].decode("ascii")
        if found[1] is not None or found[2] is not None:
            return float(digits)
        return bounded_json.whole_number(digits, self._bounds)

    def _text(self, start: int, most: int | None = None) -> str:
        """The text whose first byte stands at `start`; of a key, `most` are the characters that it may have."""
        text, width = "", 1
        for piece in self._pieces(start):
            if most is not None and len(text) + len(piece) > most:
                raise JsonError(f"A key has more than {most} characters.", "Use short names.")
            width = max(width, _width(piece))
            if (len(text) + len(piece)) * width > max(MAX_TEXT_BYTES, len(self._body) - start):
                raise JsonError("A long text holds characters that take much memory.", "Send a shorter text.")
            # A local variable's text grows in place; to join all pieces would be one step of 80 ms.
            text += piece
        return text

    def _pieces(self, start: int) -> Iterator[str]:
        """A text, decoded window by window."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        half, ended = "", False
        while not ended:
            stop = _end(_TEXT, self._body, start, start + _WINDOW)
            ended = self._body[stop : stop + 1] == b'"'
            if not ended and stop == start:
                raise NotJsonError
            raw = self._body[start:stop]
            piece = decoder.decode(raw, ended)
            if b"\\" in raw:
                piece = json.loads(f'"{piece}"')
            # The two halves of a character may stand in two pieces.
            piece = _joined(half, piece) if half else piece
            half = "" if ended or not "\ud800" <= piece[-1:] <= "\udbff" else piece[-1]
            yield piece[: len(piece) - len(half)]
            start = stop
        self.end = start + 1


def _end(pattern: re.Pattern[bytes], body: bytes | bytearray | mmap, start: int, stop: int) -> int:
    """Where the match of a pattern that also matches nothing ends."""
    found = pattern.match(body, start, stop)
    assert found is not None
    return found.end()


def _joined(half: str, rest: str) -> str:
    """Both, where half a character and its other half become one."""
    if not "\udc00" <= rest[:1] <= "\udfff":
        return half + rest
    return (half + rest[0]).encode("utf-16-le", "surrogatepass").decode("utf-16-le") + rest[1:]


def _width(text: str) -> int:
    """Bytes that each character of it takes in memory."""
    if text.isascii():
        return 1
    try:
        text.encode("latin-1")
        return 1
    except UnicodeEncodeError:
        return 2 if len(text.encode("utf-16-le", "surrogatepass")) == 2 * len(text) else 4
