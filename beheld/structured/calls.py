"""Grammars in which calls of strict functions follow their schemas, in each format that models write.

Text outside of calls is unrestricted. Some formats write values without quotes, and not every schema can be enforced
there: such schemas are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from beheld.core.errors import ParamsError
from beheld.core.structured_outputs import FORCED_CALLS, Grammar, ReasoningFormat
from beheld.structured.closed import json_rule
from beheld.structured.marks import TEXT, Tokens, up_to, words, written
from beheld.utils.json_types import types_of, values_of
from beheld.utils.quoted_grammar import quoted

# Schema keywords that restrict nothing.
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "strict"})
_SHARED = _NOTES | {"$defs", "definitions"}
_OBJECT = _SHARED | {"type", "properties", "required", "additionalProperties"}
# Some models put calls that are the whole answer between these.
_FENCE = "```"
_PYTHON_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}

Schema = Mapping[str, Any]


def leaves_room(grammar: Grammar) -> bool:
    """True if the words around calls may contain the reasoning.

    The model opens it itself, and marks separate calls from words.
    """
    reasoning = grammar.reasoning
    marked = json.loads(grammar.text)["form"] in _MARKED
    return marked and reasoning is not None and not reasoning.begun


def lark_of(text: str, tokens: Tokens, reasoning: ReasoningFormat | None = None) -> str:
    """The grammar in llguidance's dialect of Lark.

    Args:
        text: JSON: {"form": a key of text.tools.FORMATS, "tools": [{"name": ..., "schema": the argument schema of a
            strict function; null for others, "input": the grammar that the one argument of a custom tool's function
            follows, in Lark; null for others}], "most": with the form "forced", the greatest number of calls in a JSON
            list that is the whole answer, or 0 for the arguments of one function alone}.
        tokens: the tokenizer's special tokens.
        reasoning: reasoning before the answer, if any; text cannot start with its opening mark.

    Raises:
        ParamsError: the format cannot enforce a schema; the message names the part.
    """
    asked = json.loads(text)
    form, tools = asked["form"], asked["tools"]
    if form == FORCED_CALLS:
        return _forced(tools, asked["most"])
    rules = [TEXT]
    if form not in _BARE and form not in _MARKED:
        raise ParamsError(
            f"Strict functions cannot be enforced in the call format {form}.",
            "Use tool_choice 'required' or the function's name, or set strict to false.",
            param="structured_outputs",
        )
    if form in _BARE:
        rules += [_spoken(tokens), *_BARE[form](tools, tokens, "" if reasoning is None else reasoning.open)]
    else:
        rules += [words(tokens, *_MARKS[form]), *_MARKED[form](tools, tokens)]
    return "\n".join(rules)


def _forced(tools: Sequence[Any], most: int) -> str:
    if not most:
        return f"start: {_arguments(tools[0])}"
    more = f' (", " one){{0,{most - 1}}}' if most > 1 else ""
    return "\n".join([f'start: "[" one{more} "]"', f"one: {_any_of(tools)}", *_json_calls(tools, "arguments")])


def _spoken(tokens: Tokens) -> str:
    """The rule of words that begin with a special token."""
    others = tokens.others()
    return 'spoken: ""' if others is None else f"spoken: ({others} TEXT)+"


def _refused(name: str, what: str, form: str) -> ParamsError:
    return ParamsError(
        f"The function {name!r} is strict, and {what}, which the call format {form} cannot enforce.",
        "Use tool_choice 'required' or the function's name, or set strict to false.",
        param="structured_outputs",
    )


def _any_of(tools: Sequence[Any]) -> str:
    return " | ".join(f"call_{number}" for number in range(len(tools)))


def _arguments(tool: Any) -> str:
    if tool.get("input") is not None:
        return f'"{{\\"input\\": " {_text_of(tool)} "}}"'
    return json_rule({**(tool["schema"] or {}), "type": "object"})


def _text_of(tool: Any) -> str:
    """The input of a custom tool, as JSON."""
    return f'"\\"" %lark {{\n{quoted(tool["input"])}\n}} "\\""'


# ---------------------------------------------------------------------- calls in JSON


def _hermes(tools: Sequence[Any], tokens: Tokens) -> Iterator[str]:
    yield "start: (words begin call)* words TEXT"
    yield up_to("<tool_call>", tokens, "begin")
    yield f'call: "\\n" ({_any_of(tools)}) "\\n" {written("</tool_call>", tokens)}'
    yield from _json_calls(tools, "arguments")


def _json_calls(tools: Sequence[Any], key: str) -> Iterator[str]:
    for number, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool["name"])}, "{key}": '
        yield f'call_{number}: {json.dumps(begin)} {_arguments(tool)} "}}"'


def _mistral(tools: Sequence[Any], tokens: Tokens) -> Iterator[str]:
    yield "start: (words begin call)* words TEXT"
    yield up_to("[TOOL_CALLS]", tokens, "begin")
    yield 'call: " "? "[" listed (", " listed)* "]" | ' + " | ".join(f"named_{n}" for n in range(len(tools)))
    yield f"listed: {_any_of(tools)}"
    yield from _json_calls(tools, "arguments")
    number_of = f"({written('[CALL_ID]', tokens)} /[A-Za-z0-9]{{1,16}}/)?"
    for number, tool in enumerate(tools):
        behind = f"{number_of} {written('[ARGS]', tokens)}?"
        yield f"named_{number}: {json.dumps(tool['name'])} {behind} {_arguments(tool)}"


def _bare_json(key: str) -> Callable[[Sequence[Any], Tokens, str], Iterator[str]]:
    def rules(tools: Sequence[Any], tokens: Tokens, opening: str) -> Iterator[str]:
        # Any object there may be a call: only its end decides.
        yield _plain(r"[\s,;\[\]]*\{", "json", opening)
        yield f'start: plain | BLANKS? ({written("<|python_tag|>", tokens)}? calls | FENCE calls "\\n{_FENCE}")'
        yield "BLANKS: /[ \\n]{1,4}/"
        yield f'FENCE: "{_FENCE}json\\n" | "{_FENCE}\\n"'
        yield 'calls: one ("; " one)* | "[" one (", " one)* "]"'
        yield f"one: {_any_of(tools)}"
        yield from _json_calls(tools, key)

    return rules


def _plain(beginning: str, fence: str, opening: str) -> str:
    """The rule of an answer that begins neither like a call nor with reasoning."""
    marks = rf"<\|python_tag\|>|<\|python_start\|>|{_FENCE}{fence}|{_FENCE}"
    terminal = f"PLAIN: /(?s:.*)/ & ~/\\s*({marks})?\\s*{beginning}(?s:.*)/"
    if opening:
        terminal += f" & ~/\\s*{re.escape(opening)}(?s:.*)/"
    # A special token may follow only text that can no longer begin a call.
    solid = "SOLID: PLAIN & /\\s*[^\\s\\[\\]{},;`<](?s:.*)/"
    return "\n".join([terminal, solid, "plain: PLAIN | SOLID spoken"])


# ---------------------------------------------------------------------- calls in Python's words


def _pythonic(tools: Sequence[Any], tokens: Tokens, opening: str) -> Iterator[str]:
    """The first call begins with one terminal, because up to its bracket the text may be plain words."""
    names = [re.escape(tool["name"]) for tool in tools]
    yield _plain(rf"\[[\s,]*({'|'.join(names)})\s*\(", "python", opening)
    yield 'start: plain | (first more "]") | (framed more "]" end?)'
    yield 'more: (", " one)*'
    yield f"one: {_any_of(tools)}"
    leads = [tokens(mark) for mark in ("<|python_start|>", "<|python_tag|>")]
    yield f"framed: {' | '.join([*(f'<[{token}]> first' for token in leads if token is not None), 'marked'])}"
    yield f'end: {written("<|python_end|>", tokens)} | "\\n{_FENCE}"'
    for rule in ("first", "marked"):
        yield f"{rule}: {' | '.join(f'{rule}_{number}' for number in range(len(tools)))}"
    for number, (tool, name) in enumerate(zip(tools, names, strict=True)):
        rule = f"call_{number}"
        yield f"FIRST_{number}: /[ \\n]{{0,4}}\\[{name}\\(/"
        marks = rf"<\|python_start\|>|<\|python_tag\|>|{_FENCE}(python)?\n"
        yield f"MARKED_{number}: /[ \\n]{{0,4}}({marks})\\[{name}\\(/"
        yield f'first_{number}: FIRST_{number} {rule}_f0 ")"'
        yield f'marked_{number}: MARKED_{number} {rule}_f0 ")"'
        yield f'{rule}: {json.dumps(tool["name"] + "(")} {rule}_f0 ")"'
        if tool["schema"] is None:
            yield f'{rule}_f0: ({rule}_a (", " {rule}_a)*)?'
            yield f'{rule}_a: /[A-Za-z_][A-Za-z0-9_]*/ "=" (%json {{}} | {" | ".join(_PYTHON_WORDS.values())})'
            continue
        if tool.get("input") is not None:
            yield from _separated(rule, [(f'"input=" {_text_of(tool)}', True)])
            continue
        named = [
            (f"{json.dumps(key + '=')} ({_python_value(schema)})", needed)
            for key, schema, needed in _properties(tool, r"[A-Za-z_][A-Za-z0-9_]*", "pythonic")
        ]
        yield from _separated(rule, named)


def _python_value(schema: Any) -> str:
    """Values are written as JSON, and Python's constants are allowed where only they are possible."""
    words = []
    if isinstance(schema, dict) and not schema.keys() - _SHARED - {"type"}:
        declared = schema.get("type", ())
        words = [
            _PYTHON_WORDS[kind]
            for kind in ([declared] if isinstance(declared, str) else declared)
            if kind in _PYTHON_WORDS
        ]
    return " | ".join([json_rule(schema), *words])


def _separated(rule: str, items: Sequence[tuple[str, bool]]) -> Iterator[str]:
    """Items in order with commas between them; optional ones may be missing.

    `RULE_fN` matches from item N on if nothing came before it, `RULE_mN` if something did.
    """
    for number, (item, needed) in enumerate(items):
        for way, comma in (("f", ""), ("m", '", " ')):
            taken = f"{comma}{item} {rule}_m{number + 1}"
            yield f"{rule}_{way}{number}: {taken}" + ("" if needed else f" | {rule}_{way}{number + 1}")
    yield f'{rule}_f{len(items)}: ""'
    yield f'{rule}_m{len(items)}: ""'


# ---------------------------------------------------------------------- calls in tags


def _glm(tools: Sequence[Any], tokens: Tokens) -> Iterator[str]:
    yield "start: (words begin call)* words TEXT"
    yield up_to("<tool_call>", tokens, "begin")
    yield f"call: {_any_of(tools)}"
    yield "VALUE: /(?s:.*)/ & ~/(?s:.*)<\\/tool_call>(?s:.*)/ & ~/(?s:.*)<\\/arg_value>(?s:.*)/"
    yield up_to("</arg_value>", tokens, "plain", "VALUE")
    yield 'NL: "\\n"'
    key, close, value, closed = (
        written(mark, tokens) for mark in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    )
    end = written("</tool_call>", tokens)
    for number, tool in enumerate(tools):
        parts = [f"NL? {json.dumps(tool['name'])} NL?"]
        if tool["schema"] is None:
            parts.append(f"({key} /[^<>\\n]+/ {close} NL? {value} plain NL?)*")
        for name, schema, needed in _properties(tool, r"[^<>\s]([^<>\n\r]*[^<>\s])?", "glm45"):
            allowed = _value_rule(tool["name"], name, schema, "glm45", ("</arg_value>", "</tool_call>"))
            held = "plain" if allowed is None else f"({allowed}) {closed}"
            one = f"{key} {json.dumps(name)} {close} NL? {value} {held} NL?"
            parts.append(one if needed else f"({one})?")
        yield f"call_{number}: {' '.join(parts)} {end}"


def _qwen3(tools: Sequence[Any], tokens: Tokens) -> Iterator[str]:
    ends = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
    yield "start: (call | bare)* words TEXT"
    yield f'call: words begin "\\n<function=" ({_any_of(tools)}) "\\n" {written("</tool_call>", tokens)}'
    # The outer mark is often omitted.
    yield f"bare: words naked ({_any_of(tools)})"
    yield up_to("<tool_call>", tokens, "begin")
    yield up_to("<function=", tokens, "naked")
    inside = " & ".join(f"~/(?s:.*){end.replace('/', chr(92) + '/')}(?s:.*)/" for end in ends)
    yield f"VALUE: /(?s:.*)/ & {inside}"
    yield up_to("\n</parameter>", tokens, "plain", "VALUE")
    for number, tool in enumerate(tools):
        parts = [json.dumps(tool["name"] + ">\n")]
        if tool["schema"] is None:
            parts.append('("<parameter=" /[^<>\\n]+/ ">\\n" plain "\\n")*')
        for name, schema, needed in _properties(tool, r"[^<>\s]([^<>\n\r]*[^<>\s])?", "qwen3_coder"):
            allowed = _value_rule(tool["name"], name, schema, "qwen3_coder", ends)
            held = "plain" if allowed is None else f'({allowed}) "\\n</parameter>"'
            one = f'{json.dumps(f"<parameter={name}>" + chr(10))} {held} "\\n"'
            parts.append(one if needed else f"({one})?")
        yield f'call_{number}: {" ".join(parts)} "</function>"'


def _properties(tool: Any, key: str, form: str) -> Iterator[tuple[str, Any, bool]]:
    """(name, schema, whether it is required) of each argument of a strict function; none for other functions.

    Raises:
        ParamsError: only JSON could enforce the schema.
    """
    name, schema = tool["name"], tool["schema"]
    if schema is None:
        return
    for word in schema:
        if word not in _OBJECT:
            raise _refused(name, f"its schema has {word!r}", form)
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(needed, list) or schema.get("type", "object") != "object":
        raise _refused(name, "its schema is not an object's", form)
    for missing in needed:
        if missing not in properties:
            raise _refused(name, f"it requires {missing!r} without defining it", form)
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    for argument, own in properties.items():
        if not re.fullmatch(key, argument):
            raise _refused(name, f"it has an argument {argument!r}", form)
        yield argument, {**own, **shared} if isinstance(own, dict) and shared else own, argument in needed


def _value_rule(function: str, argument: str, schema: Any, form: str, ends: Sequence[str]) -> str | None:
    """The grammar of an argument's value; None for any text.

    Raises:
        ParamsError: it may be text with a schema that cannot be enforced.
    """

    def refused(what: str) -> ParamsError:
        return _refused(function, f"its argument {argument!r} {what}", form)

    if schema is True:
        return None
    if not isinstance(schema, dict):
        raise refused("allows no value")
    kinds, keywords = types_of(schema), schema.keys() - _SHARED
    if kinds and "string" not in kinds:
        return json_rule(schema)
    if not keywords or (kinds and kinds <= {"string", "null"} and keywords <= {"type"}):
        return None
    listed = values_of(schema)
    if listed and keywords <= {"type", "enum", "const"} and kinds == {"string"}:
        if not all(isinstance(entry, str) and not any(end in entry for end in ends) for entry in listed):
            raise refused("has values that cannot be written there")
        return " | ".join(map(json.dumps, listed))
    if keywords <= {"anyOf", "oneOf"} and kinds <= {"string", "null"}:
        branches = [branch for word in keywords for branch in schema[word]]
        if all(not branch.keys() - _NOTES - {"type"} for branch in branches):
            return None
    raise refused("is a text with further rules" if "string" in kinds else "has no type")


# Formats in which marks separate calls from words, and formats in which calls are the whole answer.
_MARKED: dict[str, Callable[[Sequence[Any], Tokens], Iterator[str]]] = {
    "hermes": _hermes,
    "granite4": _hermes,
    "glm45": _glm,
    "qwen3_coder": _qwen3,
    "mistral": _mistral,
}
_MARKS = {
    **dict.fromkeys(("hermes", "granite4", "qwen3_coder"), ("<tool_call>", "</tool_call>")),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
_BARE: dict[str, Callable[[Sequence[Any], Tokens, str], Iterator[str]]] = {
    "llama3_json": _bare_json("parameters"),
    "json": _bare_json("arguments"),
    "pythonic": _pythonic,
}
