"""The JSON types that a schema allows, shared by the writer and the reader of tool calls so that they agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# JSON type names of Python's types.
NAMES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists, or None."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {entry for entry in declared if isinstance(entry, str)}
    values = values_of(schema)
    if values is not None:
        return {NAMES[type(entry)] for entry in values if type(entry) in NAMES}
    for kind in ("anyOf", "oneOf"):
        if isinstance(schema.get(kind), list):
            parts = [types_of(entry) for entry in schema[kind]]
            return set().union(*parts) if all(parts) else set()
    return set()
