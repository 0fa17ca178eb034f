"""Tools in a request: their effect on the prompt, the grammar and the parsing of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from beheld.core.structured_outputs import FORCED_CALLS, StructuredOutputs
from beheld.server.errors import HttpError
from beheld.server.schema import ChatRequest
from beheld.server.tools_schema import AllowedChoice, Function, SeenCustom, Tool, ToolChoice
from beheld.text.tools import format_named


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools.

    Attributes:
        shown: the tools as the template gets them.
        form: format of the calls to parse from the text; None if calls are not parsed.
        named: the one function that must be called; the whole answer is its arguments.
        grammar: the answer's grammar.
        schemas: schemas of the functions' arguments, by name.
        max_calls: the most calls to report; None reports all.
        short_ids: calls have ids of nine letters and digits, the only ones that some templates take back.
        custom: the functions that represent custom tools.
    """

    shown: tuple[dict[str, Any], ...] | None = None
    form: str | None = None
    named: str | None = None
    grammar: StructuredOutputs | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_calls: int | None = None
    short_ids: bool = False
    custom: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ToolForm:
    """A model's format of tool calls.

    Attributes:
        name: the name of a format in text.tools.
        special: its delimiters are special tokens, which texts contain only on request.
    """

    name: str
    special: bool


def tool_form(name: str | None, tokenizer: Any) -> ToolForm | None:
    """The format of that name for a tokenizer of transformers; None if `name` is None."""
    if name is None:
        return None
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {token.content for token in added if token.special}
    return ToolForm(name, not special.isdisjoint(format_named(name).marks))


def shown_tools(tools: Sequence[Tool], max_tools: int) -> tuple[dict[str, Any], ...]:
    """The tools as the template gets them.

    Raises:
        HttpError: there are too many, or two have the same name.
    """
    names = [tool.function.name for tool in tools]
    if len(names) > max_tools:
        raise HttpError(
            400, f"There are {len(names)} tools; at most {max_tools} are allowed.", "Send fewer.", param="tools"
        )
    if len(set(names)) != len(names):
        raise HttpError(400, "Two tools have the same name.", "Give each a different name.", param="tools")
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


# Schema keywords whose contents are values, not schemas.
_VALUES = frozenset({"const", "default", "enum", "examples"})


def allowed_only(body: ChatRequest) -> ChatRequest:
    """The same request with only the functions that its tool_choice allows.

    Raises:
        HttpError: one of them is not among its tools.
    """
    choice = body.tool_choice
    if not isinstance(choice, AllowedChoice) or not body.tools:
        return body
    allowed = {each.function.name for each in choice.allowed_tools.tools}
    unknown = sorted(allowed - {tool.function.name for tool in body.tools})
    if unknown:
        raise HttpError(
            400,
            f"tool_choice names {unknown[0]!r}, which is not among tools.",
            "Name only these.",
            param="tool_choice",
        )
    kept = [tool for tool in body.tools if tool.function.name in allowed]
    return body.model_copy(update={"tools": kept, "tool_choice": choice.allowed_tools.mode})


def tool_use(body: ChatRequest, form: ToolForm | None, max_tools: int) -> ToolUse:
    """Evaluate the fields about tools.

    Raises:
        HttpError: fields contradict each other, or there are too many tools.
    """
    body = allowed_only(body)
    custom = frozenset(tool.function.name for tool in body.tools or () if isinstance(tool, SeenCustom))
    return replace(_tool_use(body, form, max_tools), custom=custom)


def _tool_use(body: ChatRequest, form: ToolForm | None, max_tools: int) -> ToolUse:
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise HttpError(
                400, "tool_choice needs tools.", "Send tools, or leave tool_choice out.", param="tool_choice"
            )
        return ToolUse()
    shown = shown_tools(body.tools, max_tools)
    functions = {tool.function.name: tool.function for tool in body.tools}
    if choice == "none":
        return ToolUse()
    schemas = {name: function.parameters or {} for name, function in functions.items()}
    most = 1 if body.parallel_tool_calls is False else None
    short = form is not None and format_named(form.name).short_ids
    if isinstance(choice, ToolChoice):
        wanted = choice.function.name
        if wanted not in functions:
            raise HttpError(
                400,
                f"tool_choice names {wanted!r}, which is not among tools.",
                "Name one of them.",
                param="tool_choice",
            )
        function = functions[wanted]
        grammar = _json(_parameters(function)) if function.input is None else _forced([function], 0)
        return ToolUse(shown, None, wanted, grammar, short_ids=short)
    if choice == "required":
        if any(function.input is not None for function in functions.values()):
            grammar = _forced(functions.values(), most or 16)
        else:
            entries = [_call_schema(each, f"#/items/anyOf/{place}") for place, each in enumerate(functions.values())]
            grammar = _json({"type": "array", "items": {"anyOf": entries}, "minItems": 1, "maxItems": most or 16})
        return ToolUse(shown, "json", None, grammar, schemas, short_ids=short)
    if form is None:
        raise HttpError(
            400,
            "This model's chat template has no known format for tool calls.",
            "Set tool_choice to 'required' or to a function. The operator may start it with --tool-call-parser.",
            param="tools",
        )
    if not any(
        tool.function.strict or (tool.function.input and format_named(form.name).holds_inputs) for tool in body.tools
    ):
        return ToolUse(shown, form.name, schemas=schemas, max_calls=most, short_ids=short)
    # The grammar of strict functions does not hold calls that stand among words.
    read = "json" if form.name == "llama3_json" else form.name
    return ToolUse(shown, read, None, _strict(body, form), schemas, most, short)


def _strict(body: ChatRequest, form: ToolForm) -> StructuredOutputs:
    """A grammar for any text in which calls of strict functions follow their schemas."""
    tools = [
        {
            "name": tool.function.name,
            "schema": (tool.function.parameters or {}) if tool.function.strict or tool.function.input else None,
            "input": tool.function.input if format_named(form.name).holds_inputs else None,
        }
        for tool in body.tools or ()
    ]
    return StructuredOutputs(calls=json.dumps({"form": form.name, "tools": tools}))


def _forced(functions: Iterable[Function], most: int) -> StructuredOutputs:
    """A grammar for an answer that is calls of these functions alone, or with 0 the arguments of the one."""
    tools = [{"name": each.name, "schema": _parameters(each), "input": each.input} for each in functions]
    return StructuredOutputs(calls=json.dumps({"form": FORCED_CALLS, "tools": tools, "most": most}))


def free_inputs(body: ChatRequest, form: ToolForm | None) -> list[str]:
    """The custom tools whose calls are not held to their grammars: the model's format has no place for them."""
    if form is None or body.tool_choice not in (None, "auto") or format_named(form.name).holds_inputs:
        return []
    return [tool.function.name for tool in body.tools or () if tool.function.input is not None]


def _json(schema: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(json=schema)


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}


def _call_schema(function: Function, place: str) -> dict[str, Any]:
    """The schema of one call, which stands at `place` in the whole one."""
    properties = {
        "name": {"const": function.name},
        "arguments": _moved(_parameters(function), f"{place}/properties/arguments"),
    }
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root lead to `place`, where the schema stands in another one."""
    if isinstance(schema, list):
        return [_moved(entry, place) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    made = {word: value if word in _VALUES else _moved(value, place) for word, value in schema.items()}
    target = made.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        made["$ref"] = place + target[1:]
    return made
