"""Calls that a grammar of strict functions lets through are read as calls that follow their schemas, in every form."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken
from transformers import AutoTokenizer

from beheld.core.errors import ParamsError
from beheld.core.structured_outputs import Grammar
from beheld.structured.calls import _BARE, _MARKED
from beheld.structured.compile import Compiler
from beheld.text.tools import FORMATS, calls_of
from tests import tiny

SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Where, and for how long.",
    "properties": {
        "place": {"enum": ["Oslo", "Oslo East", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "description": "free"},
        "on": {"type": "boolean"},
        "spans": {"type": "array", "items": {"$ref": "#/$defs/span"}, "maxItems": 2},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"span": {"type": "integer", "minimum": 0, "maximum": 3}},
}
TOOLS = (
    {"name": "tides", "schema": SCHEMA},
    {"name": "tides_now", "schema": {"type": "object", "properties": {}}},
    {"name": "loose", "schema": None},
)
SCHEMAS = {"tides": SCHEMA, "tides_now": {}, "loose": {"properties": {"q": {"type": "string"}}}}
MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
)
# How a tokenizer has the marks: as letters, as added tokens, as special ones.
WAYS = ("spelled", "added", "special")
Calls = list[tuple[str, dict[str, Any]]]
ROME: dict[str, Any] = {"place": "Rome", "days": 3}
JSON = json.dumps(ROME)
# Form -> texts that may come, with what is read out of them.
FITS: dict[str, list[tuple[str, Calls]]] = {
    "hermes": [
        (f'I look.\n<tool_call>\n{{"name": "tides", "arguments": {JSON}}}\n</tool_call>', [("tides", ROME)]),
        (
            '<tool_call>\n{"name": "tides_now", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "loose", "arguments": {"x": [1]}}\n</tool_call>',
            [("tides_now", {}), ("loose", {"x": [1]})],
        ),
        ('{"name": "tides"} is no call.', []),
    ],
    "glm45": [
        (
            "Look.\n<tool_call>tides\n<arg_key>place</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
            '<arg_value>3</arg_value>\n<arg_key>note</arg_key>\n<arg_value>a <b>\n"c"</arg_value>\n'
            "<arg_key>spans</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>",
            [("tides", {**ROME, "note": 'a <b>\n"c"', "spans": [1, 2]})],
        ),
        (
            "<tool_call>tides<arg_key>place</arg_key><arg_value>Oslo East</arg_value>"
            "<arg_key>days</arg_key><arg_value>9</arg_value></tool_call>",
            [("tides", {"place": "Oslo East", "days": 9})],
        ),
        (
            "<tool_call>tides_now\n</tool_call>\n"
            "<tool_call>loose\n<arg_key>q</arg_key>\n<arg_value>{</arg_value>\n</tool_call>",
            [("tides_now", {}), ("loose", {"q": "{"})],
        ),
        ("No key.", []),
    ],
    "qwen3_coder": [
        (
            "I look.\n<tool_call>\n<function=tides>\n<parameter=place>\nRome\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n<parameter=note>\n\na\n\n</parameter>\n<parameter=on>\ntrue\n</parameter>\n</function>\n"
            "</tool_call>",
            [("tides", {**ROME, "note": "\na\n", "on": True})],
        ),
        ("<function=tides_now>\n</function>", [("tides_now", {})]),
        (
            "<tool_call>\n<function=loose>\n<parameter=q>\n{\n</parameter>\n</function>\n</tool_call> ok",
            [("loose", {"q": "{"})],
        ),
        ("No parameter=x.", []),
    ],
    "mistral": [
        (
            f'Look.[TOOL_CALLS][{{"name": "tides", "arguments": {JSON}}}, {{"name": "tides_now", "arguments": {{}}}}]',
            [("tides", ROME), ("tides_now", {})],
        ),
        (f"[TOOL_CALLS]tides[ARGS]{JSON}[TOOL_CALLS]tides_now{{}}", [("tides", ROME), ("tides_now", {})]),
        (f"[TOOL_CALLS]tides[CALL_ID]a1b2c3d4e[ARGS]{JSON}", [("tides", ROME)]),
        ("None at all.", []),
    ],
    "llama3_json": [
        (f'{{"name": "tides", "parameters": {JSON}}}', [("tides", ROME)]),
        (
            '\n\n{"name": "tides_now", "parameters": {}}; {"name": "loose", "parameters": {"x": null}}',
            [("tides_now", {}), ("loose", {"x": None})],
        ),
        (f'<|python_tag|>{{"name": "tides", "parameters": {JSON}}}', [("tides", ROME)]),
        (f'```json\n{{"name": "tides", "parameters": {JSON}}}\n```', [("tides", ROME)]),
        ("```python\nx = {}\n```", []),
        ("See {x}.", []),
    ],
    "json": [
        (
            f'[{{"name": "tides", "arguments": {JSON}}}, {{"name": "tides_now", "arguments": {{}}}}]',
            [("tides", ROME), ("tides_now", {})],
        ),
        ("[1] says so.", []),
    ],
    "pythonic": [
        (
            '[tides(place="Rome", days=3, on=True, spans=[1]), tides_now(), loose(x=[1, 2], y=None)]',
            [("tides", {**ROME, "on": True, "spans": [1]}), ("tides_now", {}), ("loose", {"x": [1, 2], "y": None})],
        ),
        ("<|python_start|>[tides_now()]<|python_end|>", [("tides_now", {})]),
        ('```python\n[tides(place="Rome", days=3)]\n```', [("tides", ROME)]),
        ("[1] says so.", []),
        ("[rain(x=1)]", []),
    ],
}
# Granite 4 writes Hermes' calls and keeps other blanks of the words around them.
FITS["granite4"] = FITS["hermes"]
# Form -> texts that must not come, cut where they go wrong.
WRONG = {
    "hermes": [
        '<tool_call>\n{"name": "tides", "arguments": {"place": "Paris"',
        '<tool_call>\n{"name": "tides", "arguments": {"place": "Rome"}}',
        '<tool_call>\n{"name": "rain"',
        "<tool_call>rain",
    ],
    "glm45": [
        "<tool_call>rain",
        "<tool_call>tides\n</tool_call>",
        "<tool_call>tides\n<arg_key>days</arg_key>",
        "<tool_call>tides\n<arg_key>place</arg_key>\n<arg_value>Paris",
        "<tool_call>tides\n<arg_key>place</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "<tool_call>tides\n<arg_key>place</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>12",
        "<tool_call>tides_now\n<arg_key>x</arg_key>",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=rain",
        "<function=rain",
        "<function=tides>\n</function>",
        "<tool_call>\n<function=tides>\n<parameter=place>\nParis",
        "<tool_call>\n<function=tides>\n<parameter=place>\nRome\n</parameter>\n</function>",
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "rain"',
        "[TOOL_CALLS]rain",
        '[TOOL_CALLS]tides[ARGS]{"place": "Rome"}',
        '[TOOL_CALLS]tides{"place": "Paris"',
    ],
    "llama3_json": ['{"name": "rain"', '{"name": "tides", "parameters": {"place": "Rome"}}', '```json\n{"a"', '[{"a"'],
    "json": ['[{"name": "tides", "arguments": {}}', '{"x'],
    "pythonic": [
        '[tides(place="Rome")]',
        "[tides(days=",
        '[tides(place="Paris',
        "[tides_now(x=1)",
        "<|python_tag|>[tides()",
    ],
}
WRONG["granite4"] = WRONG["hermes"]


@cache
def tokenizer(way: str) -> Any:
    found = AutoTokenizer.from_pretrained(str(tiny.checkpoint("qwen2")))
    if way != "spelled":
        added = [AddedToken(mark, special=way == "special", normalized=False) for mark in MARKS]
        found.add_tokens(added, special_tokens=way == "special")
    return found


@cache
def compiler(way: str) -> Compiler:
    made = tokenizer(way)
    return Compiler(made.backend_tokenizer.to_str, len(made), frozenset({made.eos_token_id}))


def grammar(form: str, *tools: Any) -> Grammar:
    return Grammar("calls", json.dumps({"form": form, "tools": tools or TOOLS}))


def taken(matcher: LLMatcher, way: str, text: str) -> bool:
    ids = tokenizer(way)(text, add_special_tokens=False)["input_ids"]
    return bool(matcher.try_consume_tokens(ids) == len(ids))


def read(form: str, text: str) -> Calls:
    # The server reads answers with strict functions so; see server/tools.py.
    reader = FORMATS["json" if form == "llama3_json" else form].reader(SCHEMAS)
    pieces = [*reader.push(text)[1], *reader.finish()[1]]
    return [(call.name or "", json.loads(call.arguments)) for call in calls_of(pieces)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", sorted(FITS))
def test_what_fits_may_come_and_is_read_and_nothing_else(form: str, way: str) -> None:
    for text, calls in FITS[form]:
        matcher = compiler(way).matcher(grammar(form))
        assert taken(matcher, way, text), text
        assert matcher.is_accepting(), text
        assert read(form, text) == calls, text
    for text in WRONG[form]:
        assert not taken(compiler(way).matcher(grammar(form)), way, text), text


def test_every_form_with_a_grammar_is_tested() -> None:
    assert set(FITS) == set(WRONG) == _BARE.keys() | _MARKED.keys()
    assert FITS.keys() <= FORMATS.keys()


# What calls begin with, and what ends a value that may be any text.
BEGINNINGS = {
    "hermes": ("<tool_call>", '"'),
    "granite4": ("<tool_call>", '"'),
    "glm45": ("<tool_call>", "</arg_value>"),
    "qwen3_coder": ("<function=", "\n</parameter>"),
    "mistral": ("[TOOL_CALLS]", '"'),
    "llama3_json": ('{"name": "', '"'),
    "json": ('{"name": "', '"'),
    "pythonic": ("[tides(", '"'),
}


@pytest.mark.parametrize("form", sorted(BEGINNINGS))
def test_whatever_may_come_is_read_as_calls_that_fit(form: str) -> None:
    """Walks at random through what the grammar allows."""
    way = "spelled" if form in ("llama3_json", "qwen3_coder") else "special"
    begin, end = BEGINNINGS[form]
    whole = 0
    for number in range(12):
        calls = read(form, walked(form, way, begin, end, random.Random(number)))
        assert calls
        for name, arguments in calls:
            whole += name == "tides"
            assert name in SCHEMAS
            assert name == "loose" or follows(arguments, name), (name, arguments)
    assert whole >= 2


def walked(form: str, way: str, begin: str, end: str, chance: random.Random) -> str:
    made = tokenizer(way)
    matcher = compiler(way).matcher(grammar(form, *TOOLS[:2]))
    text = begin
    assert taken(matcher, way, begin)
    for _ in range(400):
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(made)) if mask[token // 8] >> token % 8 & 1]
        if made.eos_token_id in allowed:
            return text
        ending = made(end, add_special_tokens=False)["input_ids"]
        if len(allowed) > 150 and matcher.validate_tokens(ending) == len(ending):
            # Any text may stand here: end it.
            assert taken(matcher, way, end)
            text += end
            continue
        token = chance.choice(allowed)
        assert matcher.consume_token(token)
        text += made.decode([token])
    raise AssertionError(text)


def follows(arguments: dict[str, Any], name: str) -> bool:
    if name == "tides_now":
        # A schema of JSON without properties allows any; the other forms write none then.
        return True
    fits = {
        "place": lambda value: value in SCHEMA["properties"]["place"]["enum"],
        "days": lambda value: type(value) is int and 1 <= value <= 9,
        "note": lambda value: isinstance(value, str),
        "on": lambda value: isinstance(value, bool),
        "spans": lambda value: len(value) <= 2 and all(entry in range(4) for entry in value),
    }
    return {"place", "days"} <= set(arguments) and all(fits[key](value) for key, value in arguments.items())


REFUSED = [
    ({"properties": {}, "minProperties": 1}, "'minProperties'", ("glm45", "qwen3_coder", "pythonic")),
    ({"properties": {}, "required": ["x"]}, "requires 'x'", ("glm45", "qwen3_coder", "pythonic")),
    ({"properties": {"a b": {"type": "integer"}}}, "'a b'", ("pythonic",)),
    ({"properties": {"a>": {"type": "integer"}}}, "'a>'", ("glm45", "qwen3_coder")),
    ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "'a' is a text with", ("glm45", "qwen3_coder")),
    ({"properties": {"a": {"type": ["string", "integer"]}}}, "'a' is a text with", ("glm45", "qwen3_coder")),
    ({"properties": {"a": {"minimum": 3}}}, "'a' has no type", ("glm45", "qwen3_coder")),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}, "'a' has no type", ("glm45", "qwen3_coder")),
    ({"properties": {"a": {"enum": ["x</tool_call>"]}}}, "cannot be written there", ("glm45", "qwen3_coder")),
    ({"properties": {"a": False}}, "'a' allows no value", ("glm45", "qwen3_coder")),
]


@pytest.mark.parametrize(("schema", "said", "forms"), REFUSED, ids=[said for _, said, _ in REFUSED])
def test_what_a_form_cannot_be_held_to_is_refused_by_name(schema: Any, said: str, forms: tuple[str, ...]) -> None:
    for form in FITS:
        asked = grammar(form, {"name": "f", "schema": schema})
        if form not in forms:
            continue
        with pytest.raises(ParamsError, match="'f' is strict") as caught:
            compiler("spelled").matcher(asked)
        assert said in caught.value.reason
        assert form in caught.value.reason
        # The same without strictness.
        assert compiler("spelled").matcher(grammar(form, {"name": "f", "schema": None}))


def test_texts_that_may_be_null_are_texts() -> None:
    schema = {
        "properties": {
            "a": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "A"},
            "b": {"type": ["string", "null"]},
            "c": {},
        },
        "required": ["a", "b", "c"],
    }
    values = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in zip("abc", ("null", "x", "[1]"), strict=True)
    )
    text = f"<tool_call>f{values}</tool_call>"
    matcher = compiler("spelled").matcher(grammar("glm45", {"name": "f", "schema": schema}))
    assert taken(matcher, "spelled", text)
    reader = FORMATS["glm45"].reader({"f": schema})
    (call,) = calls_of([*reader.push(text)[1], *reader.finish()[1]])
    assert json.loads(call.arguments) == {"a": None, "b": "x", "c": [1]}


HELD = {
    "hermes": '<tool_call>\n{"name": "shell", "arguments": {"input": %s}}\n</tool_call>',
    "granite4": '<tool_call>\n{"name": "shell", "arguments": {"input": %s}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]shell[ARGS]{"input": %s}',
    "llama3_json": '{"name": "shell", "parameters": {"input": %s}}',
    "json": '[{"name": "shell", "arguments": {"input": %s}}]',
    "pythonic": "[shell(input=%s)]",
}


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if form.holds_inputs])
def test_inputs_of_custom_tools_follow_their_grammars_where_json_writes_them(form: str) -> None:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = {"name": "shell", "schema": schema, "input": 'start: "say \\"" /[a-z,]+/ "\\""'}
    for text, right in (('say "a,b"', True), ('say "', False), ("say a", False), ("", False)):
        for tools in ((tool,), (*TOOLS, tool)):
            matcher = compiler("added").matcher(grammar(form, *tools))
            whole = taken(matcher, "added", HELD[form] % json.dumps(text))
            assert (whole and matcher.is_accepting()) == right, (text, len(tools))
