"""Reads calls with each argument between tags and without quotes, as GLM, Qwen3-Coder, MiniMax, Step and others do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from beheld.text.marks import Seeker, held_back
from beheld.text.tools.call import NAME, Piece, Schemas, json_text, parsed
from beheld.text.tools.literal import literal_of
from beheld.utils.json_types import NAMES, types_of

# Types that schemas made from Python code name, and JSON's names for them.
_ALIASES = {
    **{"float": "number", "double": "number", "int": "integer", "str": "string", "bool": "boolean"},
    **{"dict": "object", "list": "array", "tuple": "array", "none": "null"},
}

# A number with zeros before it, which JSON does not have.
_ZEROS = re.compile(r"(-?)0+(?=\d)")
_NUMBERS = {"integer", "number", "null"}
_WORDS = {"type": "string"}


@dataclass(frozen=True)
class Tags:
    """A family's call format: for each state, the tags that end it and the state that follows.

    The states "name", "key" and "value" collect what their names say. In "done" everything is text; in other states
    text is ignored. In "tail", too, the call is complete, and another may follow.

    Attributes:
        first: the state in which a call begins.
        states: the table.
        frame: texts before and behind a value that are not part of it, if they are there.
        types: tag that ends a key -> the schema of a value whose own says no type; without it, any type may be read.
        wrappers: keys of a value that may hold all arguments, where the schema has no such key.
        quotes: marks in a value between which every tag is text; they are no part of it.
    """

    first: str
    states: Mapping[str, Mapping[str, str]]
    frame: tuple[str, str] = ("", "")
    types: Mapping[str, Any] = field(default_factory=dict)
    wrappers: frozenset[str] = frozenset()
    quotes: tuple[str, str] | None = None


GLM = Tags(
    "name",
    {
        "name": {"<arg_key>": "key"},
        "key": {"</arg_key>": "gap"},
        "gap": {"<arg_value>": "value"},
        "value": {"</arg_value>": "between"},
        "between": {"<arg_key>": "key"},
    },
)
HUNYUAN = Tags("name", {**GLM.states, "name": {"<tool_sep>": "between"}})
QWEN3 = Tags(
    "head",
    {
        "head": {"<function=": "name"},
        "name": {">": "between"},
        "between": {"<parameter=": "key", "</function>": "done"},
        "key": {">": "value"},
        # Some answers lack the tag that closes a value.
        "value": {"</parameter>": "between", "<parameter=": "key", "</function>": "done"},
        "done": {},
    },
    ("\n", "\n"),
)


def _named(invoke: str, parameter: str, last: str = "done") -> dict[str, dict[str, str]]:
    """The states of a call whose tags have names as attributes, from the tag of the call on."""
    closing, begun, ended = f"</{invoke}>", f'<{parameter} name="', f"</{parameter}>"
    return {
        "head": {f'<{invoke} name="': "name"},
        "name": {'">': "between"},
        "between": {begun: "key", closing: last},
        "key": {'">': "value"},
        "value": {ended: "between", begun: "key", closing: last},
        last: {},
    }


MINIMAX = Tags("head", _named("invoke", "parameter"), types={'">': _WORDS})
CDATA = "<![CDATA[", "]]>"
# The blank in its tags is sometimes missing, or spelled as byte-level vocabularies write it.
MINICPM5_CALLS = tuple(f'<function{blank}name="' for blank in (" ", "", "\u0120"))
_MINICPM5 = _named("function", "param")
_MINICPM5_KEYS = {f'<param{blank}name="': "key" for blank in (" ", "", "\u0120")}
MINICPM5 = Tags(
    "head",
    _MINICPM5
    | {
        "head": dict.fromkeys(MINICPM5_CALLS, "name"),
        "between": _MINICPM5["between"] | _MINICPM5_KEYS,
        "value": _MINICPM5["value"] | _MINICPM5_KEYS | {CDATA[0]: "quoted"},
        "quoted": {CDATA[1]: "value"},
    },
    wrappers=frozenset(("arguments", "properties")),
    quotes=CDATA,
)
# What stands before the call is its message's header; further calls may follow in the message.
_MUSE = _named("atem:invoke", "atem:parameter", "tail")
MUSE = Tags("header", _MUSE | {"header": _MUSE["head"], "tail": _MUSE["head"]})
# An attribute says whether the value is a text or JSON.
_TEXT, _JSON = '" string="true">', '" string="false">'


def deepseek(blank: str) -> Tags:
    """DeepSeek's, with these blanks in the tags."""
    states = _named(f"｜DSML｜{blank}invoke", f"｜DSML｜{blank}parameter")
    return Tags(
        "head",
        states | {"key": states["key"] | dict.fromkeys((_TEXT, _JSON), "value")},
        types={_TEXT: _WORDS},
        wrappers=frozenset(("arguments", "input")),
    )


_STEP3 = _named("steptml:invoke", "steptml:parameter")
# Some answers lack the kind of tool before the call.
STEP3 = Tags("kind", {"kind": {"<｜tool_sep｜>": "head", **_STEP3["head"]}, **_STEP3})


class TaggedCalls:
    """One call; a call.CallBody. Text arguments are passed on as they arrive, others when complete.

    Args:
        tags: the format.
        schemas: the functions' schemas, which give the arguments' types.
    """

    def __init__(self, tags: Tags, schemas: Schemas) -> None:
        self._tags = tags
        self._schemas = schemas
        self._state = tags.first
        self._seeker = Seeker()
        self._raw: list[str] = []
        self._held: list[str] = []
        self._plain = False
        self._called = False
        self._properties: Mapping[str, Any] = {}
        self._opened = self._closed = self._behind = False
        self._value = Value({}, tags.frame)
        self._keys: set[str] = set()
        # What begins a value that may hold all arguments.
        self._wrapped = ""

    @property
    def called(self) -> bool:
        """True once a call has begun."""
        return self._called

    @property
    def complete(self) -> bool:
        """As CallBody."""
        return not self._valued

    @property
    def _valued(self) -> bool:
        """Whether the text is a value's."""
        return self._state in ("value", "quoted")

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody."""
        pieces: list[Piece] = []
        while text and not self._plain and self._state != "done":
            ends = self._tags.states[self._state]
            before, tag, text = self._seeker.seek(text, ends)
            if not self._called:
                self._raw += (before, tag or "")
            if self._valued:
                pieces += _pieces_of(self._value.push(before))
            else:
                self._held.append(before)
            if tag is not None and tag in (self._tags.quotes or ()):
                self._state = ends[tag]
            elif tag is not None:
                self._leave(tag, pieces)
                self._state = ends[tag]
                self._held = []
                if self._state in ("done", "tail"):
                    self._close(pieces)
        if self._state == "done" and not self._behind:
            text = text.lstrip()
            self._behind = bool(text)
        return self._as_text(text) if self._plain else text, pieces

    def end(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        words, pieces = self.push("")
        rest = self._seeker.rest()
        self._raw.append("" if self._called else rest)
        if self._valued:
            pieces += [*_pieces_of(self._value.push(rest)), *self._ended_value()]
        return self._ended(rest, pieces, words)

    def cut(self) -> tuple[str, list[Piece]]:
        """As CallBody. A truncated value stays open, so that no one takes it for a complete one."""
        rest = self._seeker.rest()
        self._raw.append("" if self._called else rest)
        if self._called and self._state not in ("between", "done", "tail"):
            begun, self._wrapped = self._wrapped, ""
            if any(mark.startswith(rest) for mark in self._tags.quotes or ()):
                rest = ""
            return "", _pieces_of(begun + self._value.push(rest)) if self._valued else []
        return self._ended(rest, [], "")

    def _ended(self, rest: str, pieces: list[Piece], words: str) -> tuple[str, list[Piece]]:
        if self._state == "name" and not self._called and not self._plain and self._tags.first == "name":
            # Without arguments, only the name can show that this is a call.
            name = ("".join(self._held) + rest).strip()
            if name in self._schemas:
                self._begin(name, pieces)
        if self._called:
            self._close(pieces)
            return words, pieces
        return words + self._as_text(""), pieces

    def _leave(self, tag: str, pieces: list[Piece]) -> None:
        """Handle a tag that ends the state."""
        text = "".join(self._held)
        if self._state == "head" and text.strip():
            self._plain = True
        elif self._state == "name":
            name = text.strip()
            if NAME.fullmatch(name):
                self._begin(name, pieces)
            else:
                self._plain = True
        elif self._state == "key":
            key = text.strip()
            begun = (", " if self._opened else "{") + json_text(key) + ": "
            schema = self._properties.get(key)
            self._value = Value(schema if types_of(schema) else self._tags.types.get(tag, schema), self._tags.frame)
            if key in self._keys:
                # A stream has sent the first already.
                self._value = Nothing({}, self._tags.frame)
            elif key in self._tags.wrappers and self._properties and key not in self._properties and not self._opened:
                # Whether it holds all arguments shows at its end.
                self._wrapped, self._value = begun, Value(None, self._tags.frame)
            else:
                pieces += _pieces_of(begun)
                self._opened = True
            self._keys.add(key)
        elif self._state == "value":
            pieces += self._ended_value()

    def _ended_value(self) -> list[Piece]:
        """The end of a value; one that holds all arguments is written as those."""
        text, begun, self._wrapped = self._value.end(), self._wrapped, ""
        if begun:
            inner = parsed(text)
            holds = isinstance(inner, dict) and not inner.keys() - self._properties.keys()
            self._opened = not holds or bool(inner)
            self._keys |= inner.keys() if holds else set()
            text = text.strip()[:-1].rstrip() if holds else begun + text
            return _pieces_of(text if self._opened else "")
        return _pieces_of(text)

    def _begin(self, name: str, pieces: list[Piece]) -> None:
        pieces.append(Piece(name, ""))
        self._called, self._raw = True, []
        self._opened = self._closed = False
        self._keys = set()
        properties = self._schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}

    def _close(self, pieces: list[Piece]) -> None:
        if self._called and not self._closed:
            pieces += _pieces_of("}" if self._opened else "{}")
            self._closed = True

    def _as_text(self, text: str) -> str:
        raw, self._raw = "".join(self._raw), []
        return raw + text


class Value:
    """Converts one argument's value from the model's text to JSON.

    Args:
        schema: the value's schema, if there is one.
        frame: optional texts before and behind the value.
    """

    def __init__(self, schema: Any, frame: tuple[str, str]) -> None:
        self._types = {_ALIASES.get(name.lower(), name) for name in types_of(schema)}
        self._before, self._behind = frame
        # What may begin with the text before the value; None after that.
        self._head: str | None = ""
        self._opened = False
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Add text; returns the JSON that is now certain."""
        if not text:
            return ""
        if self._head is not None:
            text = self._head + text
            if len(text) < len(self._before) and self._before.startswith(text):
                self._head = text
                return ""
            self._head, text = None, text.removeprefix(self._before)
        if self._types != {"string"}:
            self._held.append(text)
            return ""
        text = "".join([*self._held, text])
        # The end of the text so far may be the frame's end.
        certain = len(text) - self._num_behind(text)
        self._held = [text[certain:]]
        return self._open() + _escaped(text[:certain])

    def end(self) -> str:
        """The rest."""
        text = "".join([*self._held, self._head or ""]).removesuffix(self._behind)
        return self._open() + _escaped(text) + '"' if self._types == {"string"} else typed(text, self._types)

    def _num_behind(self, text: str) -> int:
        """The number of letters at the end of the text that may be the frame's end."""
        if not self._behind or text.endswith(self._behind):
            return len(self._behind)
        return held_back(text, self._behind)

    def _open(self) -> str:
        opened, self._opened = self._opened, True
        return "" if opened else '"'


class Nothing(Value):
    """The value of an argument that stands a second time: it is left out."""

    def push(self, text: str) -> str:
        """As Value."""
        return ""

    def end(self) -> str:
        """As Value."""
        return ""


def typed(text: str, types: frozenset[str] | set[str]) -> str:
    """A value as JSON of one of these types (none allows any); a text that is no such value becomes a JSON string.

    Some models write Python's literals in place of JSON.
    """
    word = text.strip()
    if types and types <= _NUMBERS:
        word = _ZEROS.sub(r"\1", word, count=1) if _ZEROS.match(word) else word
    # Other words, such as 007, are literals in Python only by chance.
    python = word[:1] in ("[", "{") or word in ("True", "False", "None")
    for read in (parsed, literal_of) if python else (parsed,):
        try:
            value = read(word)
            found = NAMES[type(value)]
            if not types or found in types or (found == "integer" and "number" in types):
                return json_text(value)
        except ValueError:
            pass
    return json_text(text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _pieces_of(text: str) -> list[Piece]:
    return [Piece(None, text)] if text else []
