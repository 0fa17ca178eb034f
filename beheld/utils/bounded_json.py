"""JSON from strangers, bounded in depth, number of parts and digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

# Letters that are counted without letting other threads run.
_WINDOW = 1 << 20


class JsonError(ValueError):
    """What is wrong with a text that should be JSON, and what to do about it.

    Attributes:
        reason: one sentence.
        remedy: one sentence.
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
    """What one JSON text, or several together, may hold: many small things cost far more than a few large ones.

    Attributes:
        depth: of lists and objects within each other.
        keys: of objects.
        containers: lists and objects, each of which the interpreter tracks.
        values: entries of lists and objects.
        digits: of a whole number; reading them takes time that grows with their square.
    """

    depth: int = 64
    keys: int = 50_000
    containers: int = 50_000
    values: int = 1 << 19
    digits: int = 32


def parse(text: str, bounds: JsonBounds) -> Any:
    """Strict JSON: no NaN, no duplicate keys, whole characters.

    Raises:
        JsonError: it is none, or holds too much.
    """
    check_counts([text], bounds)
    value = _loads(text, bounds, object_pairs_hook=whole_object, parse_constant=refuse_constant)
    check(value, bounds)
    return value


def parse_lenient(text: str, bounds: JsonBounds) -> Any:
    """What Python's json takes, as models write it, within the bounds of one text; `check_counts` bounds several.

    Raises:
        JsonError: it is no JSON, or holds too much.
    """
    value = _loads(text, bounds)
    _check(value, bounds, lambda text: None)
    return value


def check_counts(texts: Sequence[str], bounds: JsonBounds) -> None:
    """Refuse what has too many parts, in all texts together, before anything is made of them.

    Outside of strings a colon belongs to a key, a comma stands between two values and a bracket opens a container; so
    what is counted are these marks, first everywhere (most texts hold few), then outside of strings alone.

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
                yield too_many(most, what)

    if next(excess(texts), None) is None:
        return
    outside = []
    left = 2 * (bounds.values + bounds.keys)
    for text in texts:
        # Of an escaped character nothing is left that could end a string; then every second piece is one.
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
    try:
        # Functions of Python's, unlike `int` and `float` themselves: between two numbers other threads may run.
        return json.loads(text, parse_int=lambda digits: whole_number(digits, bounds), parse_float=_fraction, **hooks)
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
        raise JsonError("The JSON has an object in which a key occurs twice.", "Say it once.")
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


def check(value: Any, bounds: JsonBounds) -> None:
    """Refuse what is nested too deeply, and halves of characters.

    Raises:
        JsonError: it is.
    """
    _check(value, bounds, _check_whole)


def _check(value: Any, bounds: JsonBounds, check_text: Callable[[str], None]) -> None:
    """Depth, and every string."""
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
    raise too_deep(bounds)


def _check_whole(text: str) -> None:
    """No half of a surrogate pair: it is no character, and no tokenizer takes it."""
    if text.isascii():
        return
    try:
        for start in range(0, len(text), _WINDOW):
            text[start : start + _WINDOW].encode()
    except UnicodeEncodeError as error:
        raise JsonError("A text holds half of a surrogate pair.", "Send whole characters.") from error
