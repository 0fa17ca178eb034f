"""Iterables of prompts or conversations: which thread reads them, their length and their end."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from beheld.api.feed import Reading
from beheld.core.errors import PromptError


def many(given: Any) -> Iterable[Any]:
    """`given`, if it can be a list of prompts or of messages.

    Raises:
        PromptError: it cannot; texts and dictionaries are iterable, but never meant as lists.
    """
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise PromptError(f"A {type(given).__name__} is not a list of prompts or messages.", "Give a list.")
    return given


def reading(items: Iterable[Any]) -> Reading:
    """The thread that should read the items: a sequence has its next item at once."""
    return Reading.TAKER if isinstance(items, Sequence) else Reading.THREAD


def length(items: Iterable[Any]) -> int | None:
    """The number of items if known; a guess for iterables that are not sequences."""
    if isinstance(items, Sequence):
        return len(items)
    try:
        hint = operator.length_hint(items, 0)
    except Exception:
        # It is only for display, and the length of a stream may raise.
        return None
    return hint or None


def each(items: Iterable[Any]) -> Generator[Any, None, None]:
    """The items. An error of the source gets an explaining note; closing this generator closes a source generator."""
    source: Iterator[Any] | None = None
    index = 0
    try:
        source = iter(items)
        for item in source:
            yield item
            index += 1
    except Exception as error:
        where = "" if reading(items) is Reading.TAKER else " The thread 'beheld-read' reads it."
        error.add_note(f"Raised by the iterable of prompts, at item {index} (counted from 0).{where}")
        raise
    finally:
        _close(source)


def conversations(given: Iterable[Any]) -> Iterable[Any]:
    """The conversations in the argument of `chat`: one, as its messages, or several.

    An iterable that is not a sequence reveals which only when it is read.
    """
    if isinstance(given, Sequence):
        return [list(given)] if given and isinstance(given[0], Mapping) else given
    return _conversations(given)


def _conversations(given: Iterable[Any]) -> Generator[Any, None, None]:
    source = iter(given)
    try:
        for first in source:
            if isinstance(first, Mapping):
                yield [first, *source]
                return
            yield first
    finally:
        _close(source)


def _close(source: Iterator[Any] | None) -> None:
    """Close a generator, so that its `finally` runs now. Other iterators, such as files, stay with their owner."""
    if isinstance(source, Generator):
        source.close()
