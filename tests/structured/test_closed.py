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
