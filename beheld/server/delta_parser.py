"""Splits one answer's growing text into reasoning, content and tool calls."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from beheld.text.reasoning import Splitter
from beheld.text.tools import Piece, Schemas, ToolReader, format_named

Delta = dict[str, Any]


class DeltaParser:
    """Turns pieces of text into the deltas of OpenAI's chunks.

    Args:
        reasoning: splits off the reasoning; None leaves it in the text.
        tools: the format of the tool calls; None if none are parsed.
        named: the function whose arguments are the whole answer.
        schemas: schemas of the functions' arguments.
        max_calls: further calls are left out.
        short_ids: calls have ids of nine letters and digits.
        forced: a grammar makes the whole answer calls.

    Attributes:
        reads_nothing: all text is content.
    """

    def __init__(
        self,
        reasoning: Splitter | None,
        tools: str | None,
        named: str | None = None,
        schemas: Schemas | None = None,
        max_calls: int | None = None,
        *,
        short_ids: bool = False,
        forced: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._reader: ToolReader | None = None if tools is None else format_named(tools).reader(schemas or {})
        self._named = named
        self.reads_nothing = reasoning is None and tools is None and named is None
        self._max_calls = max_calls
        self._short_ids = short_ids
        self._forced = forced or named is not None
        self._num_calls = 0
        self._reasoned: list[str] = []
        self._ids: set[str] = set()

    @property
    def called(self) -> bool:
        """True after a call was parsed."""
        return self._num_calls > 0

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoned)

    def push(self, text: str) -> Iterable[Delta]:
        """The deltas that are now certain."""
        if self.reads_nothing:
            return ({"content": text},) if text else ()
        return self._read(text)

    def _read(self, text: str) -> Iterator[Delta]:
        if self._reasoning is None:
            yield from self._content(text)
            return
        reasoning, words = self._reasoning.push(text)
        yield from self._reasoning_delta(reasoning)
        yield from self._content(words)

    def finish(self) -> Iterator[Delta]:
        """The remaining deltas."""
        if self._reasoning is not None:
            # A grammar lets an answer that was cut off here be nothing but a part of the opening tag.
            partial_tag = self._forced and self._reasoning.undecided
            reasoning, words = self._reasoning.finish()
            yield from self._reasoning_delta(reasoning)
            yield from self._content("" if partial_tag else words)
        if self._reader is not None:
            words, pieces = self._reader.finish()
            # Of a forced answer, what is left is the beginning of a call that was cut off.
            yield from self._content_and_calls("" if self._forced else words, pieces)

    def _reasoning_delta(self, text: str) -> Iterator[Delta]:
        if text:
            self._reasoned.append(text)
            yield {"reasoning": text, "reasoning_content": text}

    def _content(self, text: str) -> Iterator[Delta]:
        if not text:
            return
        if self._named is not None:
            if not self._num_calls:
                self._num_calls = 1
                yield self._call(0, self._named)
            yield _more(0, text)
        elif self._reader is None:
            yield {"content": text}
        else:
            yield from self._content_and_calls(*self._reader.push(text))

    def _content_and_calls(self, words: str, pieces: list[Piece]) -> Iterator[Delta]:
        if words:
            yield {"content": words}
        for number, group in itertools.groupby(pieces, self._number):
            if self._max_calls is not None and number >= self._max_calls:
                return
            first, *more = group
            if first.name is not None:
                yield self._call(number, first.name, first.id)
            arguments = "".join([first.arguments, *(piece.arguments for piece in more)])
            if arguments:
                yield _more(number, arguments)

    def _number(self, piece: Piece) -> int:
        """The index of the call that a piece belongs to, from 0."""
        self._num_calls += piece.name is not None
        return self._num_calls - 1

    def _call(self, index: int, name: str, identity: str | None = None) -> Delta:
        """The beginning of a call, before its arguments, as OpenAI's streams have it.

        The call keeps the id that the model gave it, unless an earlier one has the same.
        """
        own = uuid.uuid4().hex
        if identity is None or identity in self._ids:
            identity = own[:9] if self._short_ids else f"call_{own[:24]}"
        self._ids.add(identity)
        function = {"name": name, "arguments": ""}
        return {"tool_calls": [{"index": index, "id": identity, "type": "function", "function": function}]}


def _more(index: int, arguments: str) -> Delta:
    """A piece of a call's arguments."""
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
