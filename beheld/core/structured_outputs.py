"""Grammars of answers: StructuredOutputs is the user's form, Grammar the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The form, in StructuredOutputs.calls, of an answer that is nothing but calls in JSON, whatever the model's own.
FORCED_CALLS = "forced"


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model delimits its reasoning: the texts `open` and `close`.

    `begun` is True if the prompt already contains `open`.
    """

    open: str
    close: str
    begun: bool


@dataclass(frozen=True)
class Grammar:
    """A grammar as text.

    `kind` is "json" (a schema), "regex", "grammar" (llguidance's dialect of Lark), "structural_tag" or "calls" (see the
    files of these names in structured/).
    With `reasoning`, the grammar starts after the reasoning.
    """

    kind: str
    text: str
    reasoning: ReasoningFormat | None = None


@dataclass
class StructuredOutputs:
    """A grammar that the answer must follow: exactly one field is set.

    `json_object` set to True allows any JSON object. `structural_tag`, JSON text or a dict, is a text with parts that
    follow schemas, see structured/structural_tag.py. Only the server sets `calls`, see structured/calls.py.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    calls: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
