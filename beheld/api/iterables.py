"""What users iterate over to give prompts or conversations: which thread reads it, how long it is, how it ends."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from beheld.api.feed import Reading
from beheld.core.errors import PromptError


def many(given: Any) -> Iterable[Any]:
    """The same, if it can be a list of prompts or of messages.

    Raises:
        PromptError: it cannot; text and dictionaries are iterable, but their letters or keys are never meant.
    """
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise PromptError(f"A {type(given).__name__} is not a list of prompts or messages.", "Give a list.")
    return given


def reading(items: Iterable[Any]) -> Reading:
    """Who is to read it: of a list or another sequence, the next item is there already."""
    return Reading.TAKER if isinstance(items, Sequence) else Reading.THREAD


def length(items: Iterable[Any]) -> int | None:
    """How many items there are, if anybody knows; of what is no sequence, it is a guess."""
    if isinstance(items, Sequence):
        return len(items)
    try:
        hint = operator.length_hint(items, 0)
    except Exception:
        # It is for showing only, and what streams may have a length that raises.
        return None
    return hint or None


def each(items: Iterable[Any]) -> Generator[Any, None, None]:
    """Its items. An error that it raises gets a note that says so; a generator is closed when this one is."""
    source: Iterator[Any] | None = None
    index = 0
    try:
        source = iter(items)
        for item in source:
            yield item
            index += 1
    except Exception as error:
        where = "" if reading(items) is Reading.TAKER else " It is read in a thread of its own, 'beheld-read'."
        error.add_note(f"Raised by what gives the prompts, when asked for item {index} (counted from 0).{where}")
        raise
    finally:
        _close(source)


def conversations(given: Iterable[Any]) -> Iterable[Any]:
    """The conversations in what `chat` was given: one, as its messages, or several.

    What is no sequence shows which of the two it is when it is read, not before.
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
    """End a generator, so that its `finally` runs now; other iterators (files, say) remain their owner's."""
    if isinstance(source, Generator):
        source.close()
