"""A parser for untrusted JSON with limits on depth, number of parts and digits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

# Characters to count before other threads may run.
_WINDOW = 1 << 20
# Entries of a list that one step looks at.
_ENTRIES = 1 << 14
# Brackets of all texts that need no closer look.
_FEW = 1 << 10
# A text in quotes, perhaps to the end, or a sign outside of one.
_PIECE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:(?P<closed>")|\\?\Z)|[\[\]{},]', re.DOTALL)
# The backslashes before an escape that was cut off, which follows an even number of them.
_HALF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")
_NUMBERS = frozenset((int, float, bool, type(None)))


class JsonError(ValueError):
    """A text is not acceptable JSON.

    Attributes:
        reason: what is wrong, in one sentence.
        remedy: what to do, in one sentence.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason} {remedy}")
        self.reason = reason
        self.remedy = remedy


class NotJsonError(JsonError):
    """It is no JSON at all."""

    def __init__(self) -> None:
        super().__init__("It is not valid JSON.", "Write it as JSON.")


@dataclass(frozen=True)
class JsonBounds:
    """Limits for one JSON text, or for several together. Many small values cost far more than a few large ones.

    Attributes:
        depth: nesting of lists and objects.
        keys: number of object keys.
        containers: number of lists and objects; Python's garbage collector tracks each.
        values: number of entries of lists and objects.
        digits: digits of a whole number; the time to parse one grows with their square.
    """

    depth: int = 64
    keys: int = 50_000
    containers: int = 50_000
    values: int = 1 << 19
    digits: int = 32


@dataclass(frozen=True)
class JsonCounts:
    """The most parts that JSON texts may have.

    Attributes:
        keys, containers, values: as in JsonBounds.
    """

    keys: int
    containers: int
    values: int


def parse(text: str, bounds: JsonBounds) -> Any:
    """Parse strict JSON: no NaN, no duplicate keys, no lone surrogates.

    Raises:
        JsonError: the text is not JSON or exceeds a limit.
    """
    value, _ = parse_counted(text, bounds)
    return value


def parse_counted(text: str, bounds: JsonBounds) -> tuple[Any, JsonCounts]:
    """The same, and how many parts there are at most."""
    counts = check_counts([text], bounds)
    value = _loads(text, bounds, object_pairs_hook=whole_object, parse_constant=refuse_constant)
    check(value, bounds)
    return value, counts


def parse_lenient(text: str, bounds: JsonBounds) -> Any:
    """Parse the JSON dialect of Python's json, because models write it.

    The limits apply to one text; `check_counts` applies them to several.

    Raises:
        JsonError: the text is not JSON or exceeds a limit.
    """
    value = _loads(text, bounds)
    _check(value, bounds, lambda text: None)
    return value


def parse_cut_off(text: str, bounds: JsonBounds) -> Any:
    """Parse an object as `parse_lenient` does; one that was cut off keeps what is complete, and the last text's part.

    Raises:
        JsonError: the text is not the beginning of an object, or exceeds a limit.
    """
    try:
        return parse_lenient(text, bounds)
    except NotJsonError:
        for whole in _completions(text):
            try:
                return parse_lenient(whole, bounds)
            except NotJsonError:
                continue
        raise


def _completions(text: str) -> Iterator[str]:
    """Yield what an object that was cut off may be: with its last text and its brackets closed; without its last entry.

    Of a text that is no object's beginning there is nothing.
    """
    closing: list[str] = []
    last, quoted = 0, False
    for found in _PIECE.finditer(text):
        sign = found[0]
        quoted = sign[0] == '"' and not found["closed"]
        if sign in "{[":
            closing.append("}" if sign == "{" else "]")
        elif sign in "}]" and (not closing or closing.pop() != sign):
            return
        if sign[0] != '"':
            last = found.start() if sign == "," else found.end()
    if not closing or closing[0] != "}":
        return
    brackets = "".join(reversed(closing))
    if not quoted and text[-1].isdigit():
        # More digits may have followed.
        yield text[:last] + brackets
        return
    yield (_HALF_ESCAPE.sub(r"\1", text) + '"' if quoted else text) + brackets
    yield text[:last] + brackets


def check_counts(texts: Sequence[str], bounds: JsonBounds) -> JsonCounts:
    """Refuse texts with too many parts in total, before parsing them; returns how many there are at most.

    Outside of strings a colon belongs to a key, a comma separates two values and a bracket opens a container. So this
    counts these characters: first everywhere, since most texts hold few, and then only outside of strings, so that a
    text that is JSON itself, such as a tool's result, counts as the one text that it is.

    Raises:
        JsonError: there are too many.
    """
    counts = _counts(texts)
    if counts.containers <= _FEW and _excess(counts, bounds) is None:
        return counts
    outside = []
    left = 2 * (bounds.values + bounds.keys)
    for text in texts:
        # Without escapes, a quote always starts or ends a string, so every second piece is a string.
        bare = text.replace("\\\\", "").replace('\\"', "")
        left -= bare.count('"')
        if left < 0:
            raise JsonError("The JSON has too many texts.", "Send several smaller requests.")
        outside.append("".join(bare.split('"')[::2]))
    counts = _counts(outside)
    error = _excess(counts, bounds)
    if error is not None:
        raise error
    return counts


def _excess(counts: JsonCounts, bounds: JsonBounds) -> JsonError | None:
    """What is too many, if anything is."""
    if counts.keys > bounds.keys:
        return too_many(bounds.keys, "keys")
    if counts.values > bounds.values:
        return too_many(bounds.values, "values")
    if counts.containers > bounds.containers:
        return too_many(bounds.containers, "lists and objects")
    return None


def _counts(texts: Sequence[str]) -> JsonCounts:
    keys, values, containers = (
        sum(_count(text, mark) for text in texts for mark in marks) for marks in (":", ",", "[{")
    )
    return JsonCounts(keys, containers, values)


def _count(text: str, mark: str) -> int:
    return sum(text.count(mark, start, start + _WINDOW) for start in range(0, len(text), _WINDOW))


def _loads(text: str, bounds: JsonBounds, **hooks: Any) -> Any:
    most = bounds.digits

    def whole(digits: str) -> int:
        # As whole_number, in one call, since there may be half a million.
        return int(digits) if len(digits) <= most else whole_number(digits, bounds)

    try:
        # Unlike `int` and `float` themselves, a Python function lets other threads run between two numbers.
        return json.loads(text, parse_int=whole, parse_float=_fraction, **hooks)
    except JsonError:
        raise
    except RecursionError as error:
        raise JsonError("The JSON is nested too deeply.", f"Nest at most {bounds.depth} deep.") from error
    except ValueError as error:
        raise NotJsonError from error


def _fraction(digits: str) -> float:
    return float(digits)


def whole_number(digits: str, bounds: JsonBounds) -> int:
    """The number that these digits, and perhaps a sign, say.

    Raises:
        JsonError: there are too many of them.
    """
    if len(digits) > bounds.digits:
        raise too_many_digits(bounds.digits)
    return int(digits)


def whole_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values.

    Raises:
        JsonError: a key occurs twice.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        raise JsonError("The JSON has an object in which a key occurs twice.", "Give each key once.")
    return made


def refuse_constant(name: str) -> NoReturn:
    """Raise JsonError: `name` is a number of JavaScript's, not of JSON."""
    raise JsonError(f"{name} is not a number of JSON.", "Send a finite number.")


def too_many(most: int, what: str) -> JsonError:
    """There are more than `most` of `what`."""
    return JsonError(f"The JSON has more than {most} {what}.", "Send several smaller requests.")


def too_deep(bounds: JsonBounds) -> JsonError:
    """Lists and objects are nested too deeply."""
    return JsonError(f"The JSON is nested more than {bounds.depth} deep.", "Nest it less.")


def too_many_digits(most: int) -> JsonError:
    """A number is too long."""
    return JsonError(f"A number has more than {most} digits.", "Send a smaller one.")


def exceeds(value: Any, letters: int, values: int) -> bool:
    """Whether a JSON value has more letters in all of its texts, or more values and keys; stops at the first too many.

    Code in C that goes through a value, such as json.dumps, lets no other thread run before its end.
    """
    left = [value]
    while left:
        one = left.pop()
        values -= 1
        if isinstance(one, str):
            letters -= len(one)
        elif isinstance(one, dict | list | tuple):
            if len(one) > values:
                return True
            left += one
            if isinstance(one, dict):
                left += one.values()
        if letters < 0 or values < 0:
            return True
    return False


def check(value: Any, bounds: JsonBounds) -> None:
    """Refuse what is nested too deeply, and halves of characters.

    Raises:
        JsonError: it is.
    """
    _check(value, bounds, _check_whole)


def _check(value: Any, bounds: JsonBounds, check_text: Callable[[str], None]) -> None:
    """Check the depth and every string."""
    level = [value]
    for _ in range(bounds.depth):
        deeper: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                deeper += entry.keys()
                deeper += entry.values()
            elif isinstance(entry, list):
                for start in range(0, len(entry), _ENTRIES):
                    some = entry[start : start + _ENTRIES]
                    # Most long lists are numbers, of which there is nothing to check.
                    if not _NUMBERS.issuperset(map(type, some)):
                        deeper += some
            elif isinstance(entry, str):
                check_text(entry)
        if not deeper:
            return
        level = deeper
    raise too_deep(bounds)


def _check_whole(text: str) -> None:
    """Refuse lone surrogates: they are not characters, and tokenizers reject them."""
    if text.isascii():
        return
    try:
        for start in range(0, len(text), _WINDOW):
            text[start : start + _WINDOW].encode()
    except UnicodeEncodeError as error:
        raise JsonError("A text holds half of a surrogate pair.", "Send whole characters.") from error
