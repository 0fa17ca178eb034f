"""Which objects of a schema are closed."""

from __future__ import annotations

from typing import Any

import pytest

from beheld.structured.closed import closed

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
