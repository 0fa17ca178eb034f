"""Closes objects of a JSON schema that say nothing of further properties.

In an open object, a small model writes one invented property after the other until its tokens are used up.
"""

from __future__ import annotations

import json
from typing import Any

# Keywords whose contents are values, not schemas.
_VALUES = frozenset({"const", "default", "enum", "examples"})
# Keywords with one schema for each name.
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
# With one of these, an object's properties may not all be in `properties`.
_FURTHER = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
        *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas"),
    }
)


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in each object that has `properties` and does not say.

    `additionalProperties: true` keeps an object open. A schema that joins several by `allOf` is left as it is, because
    parts that are closed would exclude each other.
    """
    return schema if _joins(schema) else _closed(schema)


def json_rule(schema: Any) -> str:
    """A value of the closed schema in llguidance's Lark, with at most one space between tokens."""
    if isinstance(schema, dict):
        schema = {**closed(schema), "x-guidance": {"whitespace_pattern": " ?"}}
    return f"%json {json.dumps(schema)}"


def _joins(schema: Any) -> bool:
    if isinstance(schema, dict):
        parts = schema.get("allOf")
        return (isinstance(parts, list) and len(parts) > 1) or any(map(_joins, schema.values()))
    return isinstance(schema, list) and any(map(_joins, schema))


def _closed(schema: Any, *, names: bool = False) -> Any:
    """The same for a schema, a list of schemas, or (`names`) an object of schemas by name."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {name: _closed(value) for name, value in schema.items()}
    made = {word: value if word in _VALUES else _closed(value, names=word in _NAMED) for word, value in schema.items()}
    if isinstance(made.get("properties"), dict) and not made.keys() & _FURTHER:
        made["additionalProperties"] = False
    return made
