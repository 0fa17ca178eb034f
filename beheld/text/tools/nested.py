"""Reads calls whose arguments are nested elements, as MiniMax-M3 writes them, each tag after the same mark.

    ]<]minimax[>[<invoke name="order">]<]minimax[>[<items>]<]minimax[>[<item>pen]<]minimax[>[</item>...

An element with others in it is an object, or an array where its schema says so; elements of one name become an array.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from beheld.text.tools.call import NAME, Piece, Schemas, WholeCall, json_text, parsed
from beheld.text.tools.tagged import typed
from beheld.utils.json_types import types_of

MARK = "]<]minimax[>["
INVOKE = f"{MARK}<invoke name="
_NAME = re.compile(r"""\s*(["']?)([^\s"'<>]++)\1\s*>""")
_TAG = re.compile(re.escape(MARK) + r"<(/?)([^<>/\n]{1,256})>")
# Letters up to which the name must have ended.
_HEAD = 256
# Elements within each other; deeper ones are text.
_DEPTH = 100
# Holds the text around an element's elements.
_TEXT = "$text"


@dataclass
class _Element:
    """An element: its text, in parts, and the elements in it."""

    name: str
    texts: list[str] = field(default_factory=list)
    inner: list[_Element] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class NestedCall(WholeCall):
    """One call, from the name to the mark that closes it. Elements that were not closed end there.

    Args:
        schemas: the functions' schemas, which give the arguments' types.
    """

    def __init__(self, schemas: Schemas) -> None:
        # It stays complete: arguments cannot hold the mark that opens a call.
        super().__init__()
        self._schemas = schemas

    def _read(self, text: str, *, cut: bool) -> Piece | None:
        found = _NAME.match(text, 0, _HEAD)
        if found is None or not NAME.fullmatch(found[2]):
            return None
        root, is_open = _parsed(text, found.end())
        if cut and is_open:
            root.inner.pop()
        schema = self._schemas.get(found[2], {})
        arguments = json_text(_object(root.inner, schema))
        return Piece(found[2], arguments[:-1] if cut else arguments)


def _parsed(text: str, place: int) -> tuple[_Element, bool]:
    """(The root of the elements from a place on, whether one of them is open at the end.)

    A tag that opens or closes nothing is text.
    """
    stack = [_Element("")]
    for tag in _TAG.finditer(text, place):
        stack[-1].texts.append(text[place : tag.start()])
        place = tag.end()
        closing, name = tag.groups()
        if not closing and len(stack) <= _DEPTH:
            made = _Element(name)
            stack[-1].inner.append(made)
            stack.append(made)
        elif closing and any(each.name == name for each in stack[1:]):
            while stack.pop().name != name:
                pass
        else:
            stack[-1].texts.append(tag.group())
    stack[-1].texts.append(text[place:])
    return stack[0], len(stack) > 1


def _object(elements: Sequence[_Element], schema: Any) -> dict[str, Any]:
    """Elements as an object; those of one name, of which it has several, as an array."""
    known = schema if isinstance(schema, Mapping) else {}
    properties = known.get("properties")
    named = properties if isinstance(properties, Mapping) else {}
    made: dict[str, list[Any]] = {}
    for element in elements:
        found = named.get(element.name, known.get("additionalProperties"))
        made.setdefault(element.name, []).append(_value(element, found))
    return {name: values[0] if len(values) == 1 else values for name, values in made.items()}


def _value(element: _Element, schema: Any) -> Any:
    """An element as a value of its schema; without one, as text or an object."""
    kinds = {kind: part for part in _parts(schema) for kind in _kinds(part)}
    if not element.inner:
        text = element.text
        types = types_of(schema)
        if not text.strip() and "string" not in types and kinds:
            return [] if next(iter(kinds)) == "array" else {}
        return parsed(typed(text, types)) if types else text
    if next(iter(kinds), "") == "array":
        return [_value(each, kinds["array"].get("items")) for each in element.inner]
    made = _object(element.inner, kinds.get("object"))
    if element.text.strip():
        made[_free(_TEXT, made)] = element.text
    return made


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema, and those of which it allows one."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for word in ("anyOf", "oneOf"):
        choices = schema.get(word)
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, Mapping):
                yield choice


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """ "array" and "object", where the schema allows them."""
    declared = schema.get("type")
    if declared is None:
        found = ("array",) if "items" in schema else ()
        return [*found, *(("object",) if {"properties", "additionalProperties"} & schema.keys() else ())]
    listed = [declared] if isinstance(declared, str) else declared
    return [kind for kind in ("array", "object") if isinstance(listed, list) and kind in listed]


def _free(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name = "$" + name
    return name
