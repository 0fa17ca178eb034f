"""Custom tools: the model sees a function with one text, `input`, and its calls come back as calls of the tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from beheld.utils.quoted_grammar import of_regex, quoted


def function_of(name: str, description: str | None, grammar: tuple[str, str] | None) -> dict[str, Any]:
    """The function that the model sees; `grammar` is the syntax and definition that the input follows, if any."""
    words = description or ""
    if grammar is not None:
        words += f"\n\nThe input follows this grammar ({grammar[0]}):\n{grammar[1]}"
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": name, "description": words, "parameters": text | {"additionalProperties": False}}


def held_grammar(syntax: str, definition: str) -> str | None:
    """The grammar that the input's calls can be held to, in Lark; None if a part of it has no form in JSON."""
    grammar = of_regex(definition) if syntax == "regex" else definition
    try:
        quoted(grammar)
    except ValueError:
        return None
    return grammar


def not_held(name: str) -> str:
    """What a warning says of a grammar that the calls are not held to."""
    return f"The model is shown the grammar of {name}; its calls may still not follow it."


def arguments_of(text: str) -> str:
    """The input of a custom tool as the arguments of its function."""
    return json.dumps({"input": text}, ensure_ascii=False)


# How the arguments of a custom tool's function begin.
_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# The longest part of an escape that may be at the end of arguments that were cut off, and the closing `"}` with blanks.
_MOST_OVER = 8


def input_of(arguments: str) -> str:
    """The reverse; of arguments that were cut off the input so far. Those of another form stay as they are."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return _input_so_far(arguments)
    return str(found["input"]) if isinstance(found, dict) and isinstance(found.get("input"), str) else arguments


def _input_so_far(arguments: str) -> str:
    begun = _INPUT.match(arguments)
    if begun is None:
        return "" if '{"input":"'.startswith("".join(arguments.split())) else arguments
    text = arguments[begun.end() :]
    for over in range(min(_MOST_OVER, len(text)) + 1):
        try:
            found = str(json.loads(f'"{text[: len(text) - over]}"', strict=False))
        except ValueError:
            continue
        # The first half of a character that is escaped in two parts.
        return found[:-1] if "\ud800" <= found[-1:] <= "\udbff" else found
    return arguments


class CustomCalls:
    """Deltas of an answer in which calls of custom tools are such calls.

    A call's input comes in one piece, when its arguments are whole.

    Args:
        names: the custom tools; calls of other names stay as they are.

    Attributes:
        names: the same.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._open: int | None = None
        self._arguments = ""

    def read(self, deltas: Iterable[dict[str, Any]], *, ended: bool) -> Iterator[dict[str, Any]]:
        """The deltas, of which the last ones are `ended`."""
        for delta in deltas:
            calls = delta.get("tool_calls")
            if calls is None or not self.names:
                yield delta
                continue
            (call,) = calls
            if call["index"] != self._open:
                yield from self._close()
            name = call["function"].get("name")
            if name in self.names:
                self._open = call["index"]
                begun = {"index": call["index"], "id": call["id"], "type": "custom"}
                yield {"tool_calls": [{**begun, "custom": {"name": name, "input": ""}}]}
            if call["index"] == self._open:
                self._arguments += call["function"]["arguments"]
            else:
                yield delta
        if ended:
            yield from self._close()

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        text, index = input_of(self._arguments), self._open
        self._open, self._arguments = None, ""
        if text:
            yield {"tool_calls": [{"index": index, "custom": {"input": text}}]}
