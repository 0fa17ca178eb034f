"""Parses Python literals without Python: a call's keyword arguments, as JSON values."""

from __future__ import annotations

import re
from typing import Any

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<text>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')
    | (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<sign>[\[\]{}(),:=])
    )""",
    re.VERBOSE | re.DOTALL,
)
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([\"'])")
# What follows the quote that ends a text: bounded, as it is tried at each quote.
_BEHIND = re.compile(r"\s{0,9}(?:,(?=\s{0,9}[A-Za-z_]\w{0,63}\s{0,9}=)|\Z)")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIGNS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MAX_DEPTH = 32

Token = tuple[str, str]


def keywords_of(text: str) -> dict[str, Any]:
    """The arguments in `a=1, b="x"`.

    Raises:
        ValueError: the text has another form, or is nested more than 32 deep.
    """
    reader = _Reader(_tokens(text))
    found: dict[str, Any] = {}
    while reader.more:
        kind, word = reader.next()
        if kind != "word" or word in found:
            raise ValueError("no keyword")
        reader.expect("=")
        found[word] = reader.value(0)
        if reader.more:
            reader.expect(",")
    return found


def unescaped_keywords_of(text: str) -> dict[str, str]:
    """The arguments in `a='print('x')', b="y"`: texts whose own quotes the model did not escape, as they stand.

    A text ends at a quote that the next keyword or the end of the arguments follows.

    Raises:
        ValueError: the text has another form.
    """
    found: dict[str, str] = {}
    place = 0
    while place < len(text):
        keyword = _KEYWORD.match(text, place)
        if keyword is None or keyword[1] in found:
            raise ValueError("no keyword")
        begin = place = keyword.end()
        while True:
            place = text.find(keyword[2], place) + 1
            if not place:
                raise ValueError("it ends too early")
            behind = _BEHIND.match(text, place)
            if behind is not None:
                break
        found[keyword[1]] = text[begin : place - 1]
        place = behind.end()
    return found


def literal_of(text: str) -> Any:
    """The value of a Python literal such as {'a': [True, None]}.

    Raises:
        ValueError: the text is something else, or is nested more than 32 deep.
    """
    reader = _Reader(_tokens(text))
    value = reader.value(0)
    if reader.more:
        raise ValueError("more than one value")
    return value


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    end = len(text.rstrip())
    place = 0
    while place < end:
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError("no literal")
        place = token.end()
        assert token.lastgroup is not None
        found.append((token.lastgroup, token[token.lastgroup]))
    return found


class _Reader:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._place = 0

    @property
    def more(self) -> bool:
        return self._place < len(self._tokens)

    def next(self) -> Token:
        if not self.more:
            raise ValueError("it ends too early")
        self._place += 1
        return self._tokens[self._place - 1]

    def expect(self, sign: str) -> None:
        if self.next() != ("sign", sign):
            raise ValueError(f"no {sign!r}")

    def value(self, depth: int) -> Any:
        kind, word = self.next()
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        if kind == "text":
            return _text(word)
        if kind == "number":
            return int(word) if word.lstrip("+-").isdigit() else _finite(float(word))
        if kind == "word" and word in _WORDS:
            return _WORDS[word]
        if kind == "sign" and word in _CLOSING:
            return self._braces(depth) if word == "{" else self._list(_CLOSING[word], depth)
        raise ValueError("no value")

    def _list(self, closing: str, depth: int) -> list[Any]:
        made: list[Any] = []
        while not self._skip(closing):
            made.append(self.value(depth + 1))
            self._separate(closing)
        return made

    def _braces(self, depth: int) -> dict[str, Any] | list[Any]:
        """A dictionary, or a set as a list."""
        if self._skip("}"):
            return {}
        first = self.value(depth + 1)
        if self._ahead(":"):
            return self._mapping(first, depth)
        self._separate("}")
        return [first, *self._list("}", depth)]

    def _mapping(self, key: Any, depth: int) -> dict[str, Any]:
        """The dictionary that begins with this key."""
        made: dict[str, Any] = {}
        while True:
            if not isinstance(key, str):
                raise ValueError("no key")
            self.expect(":")
            made[key] = self.value(depth + 1)
            self._separate("}")
            if self._skip("}"):
                return made
            key = self.value(depth + 1)

    def _separate(self, closing: str) -> None:
        """Consume the comma after an entry; the last one needs none."""
        if not self._skip(",") and not self._ahead(closing):
            raise ValueError("no comma")

    def _ahead(self, sign: str) -> bool:
        return self.more and self._tokens[self._place] == ("sign", sign)

    def _skip(self, sign: str) -> bool:
        """Consume the character if it is next."""
        found = self._ahead(sign)
        self._place += found
        return found


def _text(word: str) -> str:
    def unescaped(found: re.Match[str]) -> str:
        number = found[1] or found[2] or found[3]
        if number is None:
            return _SIGNS.get(found[4], found.group())
        code = int(number, 16)
        if code > 0x10FFFF:
            raise ValueError("no character")
        return chr(code)

    return _ESCAPE.sub(unescaped, word[1:-1])


def _finite(number: float) -> float:
    if number in (float("inf"), float("-inf")):
        raise ValueError("not a JSON number")
    return number
