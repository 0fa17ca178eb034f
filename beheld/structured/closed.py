"""Checks JSON schemas, and closes their objects that say nothing of further properties.

In an open object, a small model writes one invented property after the other until its tokens are used up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 32
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
# Keywords that limit a value without a word on an object's properties.
_PLAIN = frozenset(
    {
        *("type", "enum", "const", "title", "description", "default", "examples", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
    }
)
# A pattern that only one name matches.
_ONE_NAME = re.compile(r"\^([\w ]+)\$")


def check(schema: Any) -> None:
    """Check that a schema has bounded depth and no external references.

    Raises:
        ValueError: it has not; the text is the reason.
    """
    level = [schema]
    for _ in range(_MAX_DEPTH):
        deeper: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                reference = entry.get("$ref")
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise ValueError("$ref may point only within the schema")
                deeper += entry.values()
            elif isinstance(entry, list):
                deeper += entry
        if not deeper:
            return
        level = deeper
    raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in each object that has `properties` and does not say.

    `additionalProperties: true` keeps an object open. A schema that joins several by `allOf` is left open, because
    parts that are closed would exclude each other; so is one with a pattern and a property for one name.
    """
    schema = _changed(schema, _moved)
    return schema if _joins(schema) else _changed(schema, _closed)


def json_rule(schema: Any) -> str:
    """A value of the closed schema in llguidance's Lark, with at most one space between tokens."""
    if isinstance(schema, dict):
        schema = {**closed(schema), "x-guidance": {"whitespace_pattern": " ?"}}
    return f"%json {json.dumps(schema)}"


def _joins(schema: Any) -> bool:
    if isinstance(schema, dict):
        parts = schema.get("allOf")
        several = isinstance(parts, list) and sum(not _is_plain(part) for part in parts) > 1
        return several or any(map(_joins, schema.values()))
    return isinstance(schema, list) and any(map(_joins, schema))


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], *, names: bool = False) -> Any:
    """The same with each schema changed, inner ones first; also of a list, or (`names`) an object of schemas."""
    if isinstance(schema, list):
        return [_changed(entry, change) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {name: _changed(value, change) for name, value in schema.items()}
    return change(
        {
            word: value if word in _VALUES else _changed(value, change, names=word in _NAMED)
            for word, value in schema.items()
        }
    )


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """An object's schema that allows no further properties, unless it says something of them."""
    if isinstance(schema.get("properties"), dict) and not schema.keys() & _FURTHER:
        return {**schema, "additionalProperties": False}
    return schema


def _is_plain(schema: Any) -> bool:
    """Whether a schema says nothing of an object's properties, so that one that is closed cannot exclude it."""
    return isinstance(schema, dict) and schema.keys() <= _PLAIN


def _moved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with patterns for the name of one property moved into that property."""
    if isinstance(schema.get("properties"), dict) and isinstance(schema.get("patternProperties"), dict):
        return {**schema, **_without_own_names(schema["properties"], schema["patternProperties"])}
    return schema


def _without_own_names(properties: dict[str, Any], patterns: dict[str, Any]) -> dict[str, Any]:
    """Both keywords, with a pattern for the name of one property moved into that property.

    llguidance lets a further property begin for such a pattern, and no name of one is left.
    """
    properties, rest = dict(properties), {}
    for pattern, schema in patterns.items():
        found = _ONE_NAME.fullmatch(pattern)
        own = properties.get(found[1]) if found else None
        if found is None or own is None or own is False or schema is False:
            rest[pattern] = schema
        elif own is True:
            properties[found[1]] = schema
        elif schema not in (own, True):
            properties[found[1]] = {"allOf": [own, schema]}
    return {"properties": properties, "patternProperties": rest}
