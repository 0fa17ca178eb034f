"""The formats in which models write tool calls, and their readers."""

from __future__ import annotations

from collections.abc import Callable

from beheld.text.tools import mistral
from beheld.text.tools.bare import json_reader, python_reader, worded_json_reader
from beheld.text.tools.call import Piece, Schemas, ToolReader, calls_of
from beheld.text.tools.json_calls import JsonCalls
from beheld.text.tools.marked import MarkedReader, Region
from beheld.text.tools.tagged import GLM, QWEN3, TaggedCalls

__all__ = ["MARKS", "OPENINGS", "READERS", "SHORT_IDS", "Piece", "Schemas", "ToolReader", "calls_of", "form_of"]

_HERMES = {"<tool_call>": Region("</tool_call>")}
# Qwen3-Coder often omits the outer mark, or writes only the closing one.
_QWEN3 = {**_HERMES, "<function=": Region("</function>", "<function=")}

# Keys are the names of vLLM's --tool-call-parser; "json" is our name for JSON without marks.
READERS: dict[str, Callable[[Schemas], ToolReader]] = {
    "hermes": lambda schemas: MarkedReader(_HERMES, JsonCalls),
    "glm45": lambda schemas: MarkedReader(_HERMES, lambda: TaggedCalls(GLM, schemas)),
    "qwen3_coder": lambda schemas: MarkedReader(_QWEN3, lambda: TaggedCalls(QWEN3, schemas), "</tool_call>"),
    "mistral": lambda schemas: MarkedReader({mistral.MARK: Region(mistral.MARK)}, mistral.MistralCalls),
    "llama3_json": worded_json_reader,
    "json": json_reader,
    "pythonic": python_reader,
}
# These marks are kept in the text even if they are special tokens, because the format cannot be read without them.
MARKS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "glm45": ("<tool_call>", "<arg_key>", "<arg_value>"),
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "mistral": (mistral.MARK, "[ARGS]"),
}
# The marks with which calls begin, where marks separate them from words.
OPENINGS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "glm45": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "mistral": (mistral.MARK,),
}
# Templates of these formats refuse the id of a call that has not nine letters and digits.
SHORT_IDS = frozenset({"mistral"})


def form_of(template: str | None) -> str | None:
    """The format that a chat template teaches its model; None if it has none."""
    if template is None:
        return None
    for form, marks in (
        ("glm45", ("<tool_call>", "<arg_key>")),
        ("qwen3_coder", ("<function=", "<parameter=")),
        ("hermes", ("<tool_call>",)),
        ("mistral", (mistral.MARK,)),
        ("pythonic", ("[func_name1(",)),
        ("llama3_json", ('"parameters": ', "tools")),
    ):
        if all(mark in template for mark in marks):
            return form
    return None
