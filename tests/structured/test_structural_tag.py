"""Structural tags: free text, and schemas between the tags, where tags are spelled and where they are tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from beheld.core.errors import ParamsError
from beheld.core.structured_outputs import StructuredOutputs
from beheld.structured.compile import grammar_of
from tests.structured.test_calls import WAYS, compiler, taken

PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
SEVERAL = {
    "structures": [
        {"begin": "<function=rain>", "schema": PLACE, "end": "</function>"},
        {"begin": "<function=wind>", "schema": {"type": "integer"}, "end": "</function>"},
        {"begin": "<tool_call>", "schema": PLACE, "end": "</tool_call>"},
    ],
    "triggers": ["<function=", "<tool_call>"],
}
FITS = (
    "It rains.",
    '<function=rain>{"place": "Rome"}</function>',
    'First <function=wind>12</function> and <function=rain>{"place": "Oslo"}</function> at last',
    'So <tool_call>{"place": "Rome"}</tool_call>.',
)
WRONG = (
    '<function=rain>{"place": "Paris',
    "<function=snow",
    "a <function=wind>x",
    "<function=wind>1</function> <function=wind>}",
    '<tool_call>{"name"',
)


ANY = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
YES = {"type": "const_string", "value": "yes"}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "or", "elements": [nested(depth - 1)]} if depth else YES


def matcher(way: str, given: Any) -> Any:
    return compiler(way).matcher(grammar_of(StructuredOutputs(structural_tag=given)))


@pytest.mark.parametrize("way", WAYS)
def test_parts_between_tags_follow_their_schemas(way: str) -> None:
    for text in FITS:
        made = matcher(way, SEVERAL)
        assert taken(made, way, text), text
        assert made.is_accepting(), text
    for text in WRONG:
        assert not taken(matcher(way, json.dumps(SEVERAL)), way, text), text


def test_the_newer_form_may_want_one_tag_and_end_after_it() -> None:
    tags = [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</a>"}]
    form = {"type": "triggered_tags", "triggers": ["<a>"], "tags": tags}
    for needed in (False, True):
        for single in (False, True):
            given = {"format": form | {"at_least_one": needed, "stop_after_first": single}}
            for text, whole in (("x", not needed), ("x<a>1</a>", True)):
                made = matcher("spelled", given)
                assert taken(made, "spelled", text)
                assert made.is_accepting() == whole, (given, text)
            assert taken(matcher("spelled", given), "spelled", "<a>1</a>, ") != single


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("[", "not JSON"),
        ("[]", "no object"),
        ({"triggers": ["<"]}, "no list structures"),
        ({"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<"]}, "needs begin, schema and end"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": "<"}], "triggers": ["["]}, "none of the triggers"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": "<"}], "triggers": [""]}, "no text"),
        ({"format": {"type": "tag"}}, "a tag begin, content and end"),
        ({"format": {"type": "dance"}}, "'dance' is no structural format"),
        ({"format": 1}, "no object"),
        ({"format": {"type": "sequence", "elements": [ANY, ANY]}}, "must be followed"),
        ({"format": {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": ""}]}}, "needs a value"),
        ({"format": {"type": "or", "elements": [{"type": "sequence", "elements": [1]}]}}, "no structural format"),
        ({"format": {"type": "tag", "begin": "<a>", "content": ANY, "end": ""}}, "needs an end"),
        ({"format": {"type": "regex"}}, "needs a pattern"),
        ({"format": {"type": "tags_with_separator", "tags": [1], "separator": ","}}, "no object"),
        ({"format": nested(40)}, "nested more than 32 deep"),
    ],
)
def test_other_forms_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ParamsError, match=words):
        matcher("spelled", given)


@pytest.mark.parametrize("triggers", [["<function=", "<f"], ["<f", "<function="]])
def test_triggers_may_begin_with_each_other(triggers: list[str]) -> None:
    tags = [
        {"begin": "<function=rain>", "schema": PLACE, "end": "</function>"},
        {"begin": "<fetch>", "schema": {"type": "integer"}, "end": "</fetch>"},
    ]
    for text in ("<fetch>1</fetch>", '<function=rain>{"place": "Rome"}</function>', "a <fetch>1</fetch> b"):
        made = matcher("spelled", {"structures": tags, "triggers": triggers})
        assert taken(made, "spelled", text), text
        assert made.is_accepting(), text
    assert not taken(matcher("spelled", {"structures": tags, "triggers": triggers}), "spelled", "<fetch>x")


@pytest.mark.parametrize("depth", [40, 900])
@pytest.mark.parametrize("newer", [False, True])
def test_deep_schemas_of_tags_are_refused(depth: int, newer: bool) -> None:
    schema = '{"items":' * depth + "true" + "}" * depth
    inner = f'"content": {{"type": "json_schema", "json_schema": {schema}}}' if newer else f'"schema": {schema}'
    tag = f'{{"begin": "<a>", {inner}, "end": "</a>"}}'
    given = f'{{"structures": [{tag}], "triggers": ["<a>"]}}'
    if newer:
        given = f'{{"format": {{"type": "triggered_tags", "tags": [{tag}], "triggers": ["<a>"]}}}}'
    with pytest.raises(ParamsError, match="nested more than 32 deep"):
        matcher("spelled", given)


def test_schemas_of_tags_refer_to_nothing_outside() -> None:
    tag = {"begin": "<a>", "schema": {"$ref": "https://example.com/a"}, "end": "</a>"}
    with pytest.raises(ParamsError, match="only within the schema"):
        matcher("spelled", {"structures": [tag], "triggers": ["<a>"]})


def test_what_cannot_be_written_as_json_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ParamsError, match="nested too deep"):
        grammar_of(StructuredOutputs(json={"enum": deep}))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("form", "fits", "wrong"),
    [
        (ANY, ["", "a\nb"], []),
        (YES, ["yes"], ["", "yes!", "no"]),
        ({"type": "regex", "pattern": "a/b+\\d\\/"}, ["a/bb1/"], ["ab1/", "a/b1"]),
        ({"type": "or", "elements": [YES, NUMBER, nested(3)]}, ["yes", "12"], ["no", "yes12"]),
        ({"type": "or", "elements": [NUMBER, ANY]}, ["12", "yes"], []),
        ({"type": "sequence", "elements": [YES, NUMBER]}, ["yes12"], ["yes", "12yes"]),
        ({"type": "sequence", "elements": [YES, ANY]}, ["yes", "yes, 1"], ["no"]),
        (
            {"type": "tag", "begin": "<tool_call>", "content": ANY, "end": "</tool_call>"},
            ["<tool_call>x y</tool_call>", "<tool_call></tool_call>"],
            ["<tool_call>x", "x", "<tool_call>x</tool_call>y"],
        ),
        (
            {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "</tool_call>"}, NUMBER]},
            ["so</tool_call>12", "</tool_call>3"],
            ["so</tool_call>x", "so"],
        ),
        (
            {
                "type": "sequence",
                "elements": [ANY, {"type": "tag", "begin": "[", "content": NUMBER, "end": ["]", ")"]}],
            },
            ["so [12]", "[3)"],
            ["so [x]", "so", "[1] "],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["hello"],
                "tags": [{"begin": "hello_flag", "content": ANY, "end": "hello"}],
            },
            ["a", "hello_flag x hello b"],
            ["hello b"],
        ),
        (
            {
                "type": "tags_with_separator",
                "separator": "\n",
                "at_least_one": True,
                "tags": [
                    {"begin": "<a>", "content": NUMBER, "end": ["</a>", ""]},
                    {"begin": "<b>", "content": {"type": "sequence", "elements": [YES, ANY]}, "end": "</b>"},
                ],
            },
            ["<a>1</a>", "<a>1</a>\n<a>2\n<b>yes?</b>"],
            ["", "<a>1</a><a>2</a>", "<a>1</a>\n", "<b>?</b>"],
        ),
    ],
)
def test_formats_are_followed(way: str, form: Any, fits: list[str], wrong: list[str]) -> None:
    for text in fits:
        made = matcher(way, {"type": "structural_tag", "format": form})
        assert taken(made, way, text), text
        assert made.is_accepting(), text
    for text in wrong:
        made = matcher(way, {"format": form})
        assert not (taken(made, way, text) and made.is_accepting()), text


@pytest.mark.parametrize("way", WAYS)
def test_constant_texts_may_hold_special_tokens(way: str) -> None:
    """Those of Hermes' calls do, in most tags of which they are the marks."""
    begin, end = '<tool_call>\n{"name": "rain", "arguments": ', "}\n</tool_call>"
    call = f'{begin}{{"place": "Rome"}}{end}'
    schema = {"type": "json_schema", "json_schema": PLACE}
    tag = {"type": "tag", "begin": begin, "content": schema, "end": end}
    free = tag | {"content": ANY}
    several = {"type": "tags_with_separator", "tags": [tag], "separator": "</tool_call><tool_call>"}
    constant = {"type": "const_string", "value": call}
    cases: list[tuple[Any, list[str], list[str]]] = [
        ({"structures": [{"begin": begin, "schema": PLACE, "end": end}], "triggers": ["<tool_call>"]},
         ["It rains.", f"a {call}\n{call} b"], ["<tool_call>rain", f"{begin}{{}}"]),
        ({"format": tag}, [call], [f"a {call}", f"{begin}1{end}"]),
        ({"format": free}, [call, f"{begin}}}\n{{}}{end}"], [f"{call} b"]),
        ({"format": several}, [call, f"{call}</tool_call><tool_call>{call}"], [f"{call}{call}"]),
        ({"format": {"type": "sequence", "elements": [ANY, tag]}}, [call, f"a\n{call}"], [f"{call} b"]),
        ({"format": {"type": "sequence", "elements": [constant, YES]}}, [f"{call}yes"], [f"{call}no"]),
    ]  # fmt: skip
    for given, fits, wrong in cases:
        for text in fits:
            made = matcher(way, given)
            assert taken(made, way, text), (given, text)
            assert made.is_accepting(), (given, text)
        for text in wrong:
            made = matcher(way, given)
            assert not (taken(made, way, text) and made.is_accepting()), (given, text)
