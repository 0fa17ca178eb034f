"""A parser for untrusted JSON with limits on depth, number of parts and digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Characters to count before other threads may run.
_WINDOW = 1 << 20


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


def parse(text: str, bounds: JsonBounds) -> Any:
    """Parse strict JSON: no NaN, no duplicate keys, no lone surrogates.

    Raises:
        JsonError: the text is not JSON or exceeds a limit.
    """
    check_counts([text], bounds)
    value = _loads(text, bounds, object_pairs_hook=_object, parse_constant=_constant)
    _check(value, bounds, _check_whole)
    return value


def parse_lenient(text: str, bounds: JsonBounds) -> Any:
    """Parse the JSON dialect of Python's json, because models write it.

    The limits apply to one text; `check_counts` applies them to several.

    Raises:
        JsonError: the text is not JSON or exceeds a limit.
    """
    value = _loads(text, bounds)
    _check(value, bounds, lambda text: None)
    return value


def check_counts(texts: Sequence[str], bounds: JsonBounds) -> None:
    """Refuse texts with too many parts in total, before parsing them.

    Outside of strings a colon belongs to a key, a comma separates two values and a bracket opens a container. So this
    counts these characters: first everywhere, since most texts hold few, and then only outside of strings.

    Raises:
        JsonError: there are too many.
    """
    counted = (
        (":", bounds.keys, "keys"),
        (",", bounds.values, "values"),
        ("[{", bounds.containers, "lists and objects"),
    )

    def excess(texts: Sequence[str]) -> Iterator[JsonError]:
        for marks, most, what in counted:
            if sum(_count(text, mark) for text in texts for mark in marks) > most:
                yield JsonError(f"The JSON has more than {most} {what}.", "Send several smaller requests.")

    if next(excess(texts), None) is None:
        return
    outside = []
    left = 2 * (bounds.values + bounds.keys)
    for text in texts:
        # Without escapes, a quote always starts or ends a string, so every second piece is a string.
        bare = text.replace("\\\\", "").replace('\\"', "")
        left -= bare.count('"')
        if left < 0:
            raise JsonError("The JSON has too many texts.", "Send several smaller requests.")
        outside.append("".join(bare.split('"')[::2]))
    for error in excess(outside):
        raise error


def _count(text: str, mark: str) -> int:
    return sum(text.count(mark, start, start + _WINDOW) for start in range(0, len(text), _WINDOW))


def _loads(text: str, bounds: JsonBounds, **hooks: Any) -> Any:
    def whole_number(digits: str) -> int:
        # Unlike `int` itself, a Python function lets other threads run between two numbers.
        if len(digits) > bounds.digits:
            raise JsonError(f"A number has more than {bounds.digits} digits.", "Send a smaller one.")
        return int(digits)

    try:
        return json.loads(text, parse_int=whole_number, parse_float=_fraction, **hooks)
    except JsonError:
        raise
    except RecursionError as error:
        raise JsonError("The JSON is nested too deeply.", f"Nest at most {bounds.depth} deep.") from error
    except ValueError as error:
        raise JsonError("It is not valid JSON.", "Write it as JSON.") from error


def _fraction(digits: str) -> float:
    return float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise JsonError("The JSON has an object in which a key occurs twice.", "Give each key once.")
    return made


def _constant(name: str) -> Any:
    raise JsonError(f"{name} is not a number of JSON.", "Send a finite number.")


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
                deeper += entry
            elif isinstance(entry, str):
                check_text(entry)
        if not deeper:
            return
        level = deeper
    raise JsonError(f"The JSON is nested more than {bounds.depth} deep.", "Nest it less.")


def _check_whole(text: str) -> None:
    """Refuse lone surrogates: they are not characters, and tokenizers reject them."""
    if text.isascii():
        return
    try:
        for start in range(0, len(text), _WINDOW):
            text[start : start + _WINDOW].encode()
    except UnicodeEncodeError as error:
        raise JsonError("A text holds half of a surrogate pair.", "Send whole characters.") from error
