"""JSON that is written in pieces, of lists and texts that exist only while they are written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Characters and elements that are made in one turn, which takes some two milliseconds.
_PIECE, _ELEMENTS = 16 << 10, 256
# Candidates of an answer's tokens that are written in one turn.
SHORT = 512
_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class LongList:
    """A list of JSON values that exist only while they are written.

    Args:
        parts: each makes elements anew whenever it is called; together they are the list.
    """

    def __init__(self, *parts: Callable[[], Iterable[Any]]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from part()

    def __add__(self, more: Iterable[Any]) -> LongList:
        return LongList(self.__iter__, more.__iter__)

    def __radd__(self, before: Iterable[Any]) -> LongList:
        return LongList(before.__iter__, self.__iter__)


class LongText:
    """A text of letters that JSON does not escape, whose pieces exist only while they are written.

    Args:
        pieces: makes them anew whenever it is called, each in a moment.
    """

    def __init__(self, pieces: Callable[[], Iterable[str]]) -> None:
        self.pieces = pieces


class LongJson:
    """A JSON value that may hold long lists and texts.

    Attributes:
        lists: these, in order.

    Raises:
        ValueError: a number is not finite.
    """

    def __init__(self, value: Any) -> None:
        self.lists: list[LongList | LongText] = []
        # Takes the place of each; no client can send this text.
        mark = uuid.uuid4().hex

        def set_aside(found: Any) -> str:
            if not isinstance(found, LongList | LongText):
                raise TypeError(f"{type(found).__name__} is not JSON")
            self.lists.append(found)
            return mark

        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=set_aside)
        self._around = encoder.encode(value).split(f'"{mark}"')

    def whole(self) -> bytes:
        """The text in UTF-8."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The text in UTF-8, in pieces of at most some 16 KiB; what is between the lists is not divided."""
        texts: list[str] = []
        size = 0
        for text in self._texts():
            texts.append(text)
            size += len(text)
            if size >= _PIECE or len(texts) >= _ELEMENTS:
                yield "".join(texts).encode()
                texts.clear()
                size = 0
        yield "".join(texts).encode()

    def _texts(self) -> Iterator[str]:
        before, *others = self._around
        yield before
        for values, after in zip(self.lists, others, strict=True):
            if isinstance(values, LongText):
                yield '"'
                yield from values.pieces()
                yield f'"{after}'
                continue
            comma = "["
            for value in values:
                yield comma + _encoded(value)
                comma = ","
            yield "[]" if comma == "[" else "]"
            yield after
