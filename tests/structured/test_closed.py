"""Which objects of a schema are closed."""

from __future__ import annotations

import random
from typing import Any

import llguidance
import pytest

from beheld.structured.closed import closed, json_rule

TEXT = {"type": "string"}
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": TEXT}}
CLOSED = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (OPEN, CLOSED),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"$defs": {"properties": OPEN}, "$ref": "#/$defs/x"}, {"$defs": {"properties": CLOSED}, "$ref": "#/$defs/x"}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [OPEN]}, {"allOf": [CLOSED]}),
        ({"properties": {"default": OPEN}}, {"properties": {"default": CLOSED}, "additionalProperties": False}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
    ],
)
def test_an_object_with_properties_is_closed(schema: Any, wanted: Any) -> None:
    assert closed(schema) == wanted
    assert closed(wanted) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": TEXT},
        {**OPEN, "patternProperties": {"^x": TEXT}},
        {**OPEN, "anyOf": [{"required": ["a"]}]},
        {"allOf": [OPEN, {"properties": {"b": OPEN}}]},
        {"const": OPEN},
        {"type": "object", "default": OPEN},
    ],
)
def test_what_says_more_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


def test_a_pattern_for_the_name_of_a_property_moves_into_the_property() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": TEXT}, "additionalProperties": False}
    patterns = {"^a$": {"minimum": 3}, "^b$": TEXT, "^c$": TEXT, "^a": {"maximum": 9}}
    assert closed({**schema, "patternProperties": patterns}) == {
        "properties": {"a": {"allOf": [{"type": "integer"}, {"minimum": 3}]}, "b": TEXT},
        "patternProperties": {"^c$": TEXT, "^a": {"maximum": 9}},
        "additionalProperties": False,
    }


def _takes(schema: Any, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, f"start: {json_rule(schema)}")
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens([*text.encode()]) == len(text.encode()))


@pytest.mark.parametrize("wrap", [lambda part: {"items": part}, lambda part: {"anyOf": [part, {"type": "null"}]}])
def test_a_pattern_of_objects_excludes_no_property(wrap: Any) -> None:
    """Both parts were closed, and only an object without properties was left."""
    own, pattern = ({"type": "object", "properties": {name: TEXT}, "required": [name]} for name in "ab")
    schema = {"properties": {"k": wrap(own)}, "patternProperties": {"^k$": wrap(pattern)}, "required": ["k"]}
    value = '{"a": "1", "b": "2"}'
    assert _takes({"type": "object", **schema}, '{"k": ' + (f"[{value}]" if "items" in wrap(own) else value) + "}")


def test_a_pattern_that_refers_to_an_object_excludes_no_property() -> None:
    objects = {name: {"type": "object", "properties": {name: TEXT}} for name in "ab"}
    schema = {"$defs": objects, "type": "object", "properties": {"k": {"$ref": "#/$defs/a"}}, "required": ["k"]}
    schema["patternProperties"] = {"^k$": {"$ref": "#/$defs/b"}}
    assert _takes(schema, '{"k": {"a": "1", "b": "2"}}')


def test_a_pattern_of_objects_may_require_what_the_property_does_not_name() -> None:
    own = {"type": "object", "properties": {"a": TEXT}}
    schema = {"type": "object", "properties": {"k": own}, "patternProperties": {"^k$": {"required": ["b"]}}}
    assert _takes(schema, '{"k": {"a": "1", "b": 1}}')


@pytest.mark.parametrize(("own", "pattern"), [(TEXT, True), (True, TEXT), (True, True)])
def test_a_pattern_that_allows_all_leaves_no_dead_end(own: Any, pattern: Any) -> None:
    schema = {"type": "object", "properties": {"k": own}, "patternProperties": {"^k$": pattern}, "required": ["k"]}
    assert _takes({**schema, "additionalProperties": False}, '{"k": "1"}')
    assert not _takes({**schema, "additionalProperties": False}, '{"k": "1",')


def test_a_pattern_for_the_name_of_a_property_leaves_no_dead_end() -> None:
    """After the last property a comma was allowed, and then nothing: most answers failed in the middle."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "multipleOf": 5}, "tags": {"type": "array", "items": TEXT}},
        "required": ["score", "tags"],
        "additionalProperties": False,
        "patternProperties": {"^score$": {"type": "integer"}},
    }
    tokenizer = llguidance.LLTokenizer("byte")
    for seed in range(30):
        drawn, matcher = random.Random(seed), llguidance.LLMatcher(tokenizer, f"start: {json_rule(schema)}")
        for _ in range(60):
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(tokenizer.vocab_size) if mask[token >> 3] >> (token & 7) & 1]
            assert allowed, seed
            assert not matcher.is_error()
            matcher.consume_token(drawn.choice(allowed))
            if matcher.is_stopped():
                break
