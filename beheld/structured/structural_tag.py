"""Structural tags: free text in which the content between given tags follows a schema.

    text <function=get_weather>{"city": "Paris"}</function> text
         trigger
         begin --------------->  schema          end ------->

A trigger is the beginning of the tags that may follow it; after one, only these tags can go on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import ParamsError
from beheld.structured.closed import check, json_rule
from beheld.structured.marks import TEXT, Tokens, up_to, words, written

_MAX_DEPTH = 32
_KINDS = frozenset(
    (
        *("any_text", "const_string", "json_schema", "regex", "sequence", "or"),
        *("tag", "triggered_tags", "tags_with_separator"),
    )
)
_FORMAT = f'Send {{"format": FORMAT}}; the types of formats are {", ".join(sorted(_KINDS))}.'
_FORM = 'Send {"structures": [{"begin": TEXT, "schema": SCHEMA, "end": TEXT}], "triggers": [TEXT]}.'


@dataclass(frozen=True)
class _Tag:
    """A tag, whose content is a format: {"type": "json_schema", ...} and others, see `_Formats`."""

    begin: str
    content: Mapping[str, Any]
    ends: Sequence[str]


@dataclass(frozen=True)
class _Until:
    """Free text up to a constant text or a tag."""

    after: Mapping[str, Any]


@dataclass(frozen=True)
class _Asked:
    """The tags, the beginnings that trigger them, whether there is one at least, and whether one ends the answer."""

    tags: Sequence[_Tag]
    triggers: Sequence[str]
    needed: bool = False
    single: bool = False


def lark_of(text: str, tokens: Tokens) -> str:
    """The grammar in llguidance's dialect of Lark.

    Args:
        text: JSON, vLLM's form with `structures` and `triggers`, or xgrammar's with `format`.
        tokens: the tokenizer's special tokens.

    Raises:
        ParamsError: it has another form, or a tag begins with no trigger.
        ValueError: a schema may not be used; see `check`.
    """
    made = _Formats(tokens)
    given = _read(text)
    answer = made.triggered(given) if isinstance(given, _Asked) else made.answer(given)
    return "\n".join([TEXT, *made.rules, f"start: {answer}"])


class _Formats:
    """Turns formats into expressions, with the rules that these need.

    Free text goes on to the end of the answer, or up to the text that must follow it: the end of its tag, or a constant
    text that is the next element of its sequence.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.rules: list[str] = []

    def answer(self, given: Any, depth: int = 0) -> str:
        """What ends the answer."""
        kind = _kind(given, depth)
        if kind == "any_text":
            return "TEXT"
        if kind == "triggered_tags":
            return self.triggered(_triggered(given))
        if kind == "sequence":
            *first, last = _elements(given)
            return f"{self._several(first, depth)} {self.answer(last, depth + 1)}".lstrip()
        if kind == "or":
            return f"({' | '.join(self.answer(each, depth + 1) for each in _list(given, 'elements'))})"
        return self._one(given, depth)

    def triggered(self, asked: _Asked) -> str:
        """Free text with tags in it."""
        groups: dict[str, list[_Tag]] = {}
        for tag in asked.tags:
            groups.setdefault(_mark(tag.begin, asked.triggers, self._tokens), []).append(tag)
        ends = [end for tag in asked.tags for end in tag.ends]
        place = len(self.rules)
        self.rules.append(words(self._tokens, *groups, *ends).replace("words:", f"words_{place}:", 1))
        found = []
        for mark, tags in groups.items():
            name = f"mark_{len(self.rules)}"
            self.rules.append(up_to(mark, self._tokens, name))
            parts = ((self._constant(tag.begin[len(mark) :]), self._ended(tag.content, tag.ends, 1)) for tag in tags)
            rests = [" ".join(part) for part in parts]
            found.append(f"{name} ({' | '.join(rests)})")
        self.rules.append(f"one_{place}: words_{place} ({' | '.join(found)})")
        if asked.single:
            return f"one_{place}" if asked.needed else f"(one_{place} | words_{place} TEXT)"
        return f"one_{place}{'+' if asked.needed else '*'} words_{place} TEXT"

    def _one(self, given: Any, depth: int) -> str:
        """A format that knows its end by itself."""
        kind = _kind(given, depth)
        if isinstance(given, _Until):
            return self._until(given.after, depth)
        if kind == "const_string":
            value = given.get("value")
            if not isinstance(value, str):
                raise _wrong("A const_string needs a value", _FORMAT)
            return self._constant(value)
        if kind == "json_schema":
            return json_rule(_schema(given.get("json_schema")))
        if kind == "regex":
            return self._regex(given)
        if kind == "sequence":
            *first, last = _elements(given)
            return f"({self._several(first, depth)} {self._one(last, depth + 1)})"
        if kind == "or":
            return f"({' | '.join(self._one(each, depth + 1) for each in _list(given, 'elements'))})"
        if kind == "tag":
            tag = _tag(given)
            return f"({written(tag.begin, self._tokens)} {self._ended(tag.content, tag.ends, depth + 1)})"
        if kind == "tags_with_separator":
            return self._separated(given, depth)
        raise _wrong(f"A format {kind} can only stand at the end of an answer, or of a tag", _FORMAT)

    def _ended(self, given: Any, ends: Sequence[str], depth: int) -> str:
        """A format, and one of the texts that must follow it."""
        kind = _kind(given, depth)
        if kind == "any_text":
            if not all(ends):
                raise _wrong("Free text needs an end", _FORMAT)
            name = f"text_{len(self.rules)}"
            self.rules.append("\n".join(up_to(end, self._tokens, f"{name}_{k}") for k, end in enumerate(ends)))
            return f"({' | '.join(f'{name}_{k}' for k in range(len(ends)))})"
        if kind == "sequence":
            *first, last = _elements(given)
            return f"({self._several(first, depth)} {self._ended(last, ends, depth + 1)})"
        closing = " | ".join(self._constant(end) for end in ends)
        return f"{self._one(given, depth)} ({closing})"

    def _several(self, elements: Sequence[Any], depth: int) -> str:
        """All elements of a sequence but the last."""
        return " ".join(self._one(each, depth + 1) for each in elements)

    def _until(self, after: Mapping[str, Any], depth: int) -> str:
        """Free text, and the constant text or the tag that must follow it."""
        tag = _tag(after) if after["type"] == "tag" else None
        stop = after.get("value") if tag is None else tag.begin
        if not isinstance(stop, str) or not stop:
            raise _wrong("A const_string after free text needs a value", _FORMAT)
        name = f"before_{len(self.rules)}"
        self.rules.append(up_to(stop, self._tokens, name))
        return name if tag is None else f"({name} {self._ended(tag.content, tag.ends, depth + 1)})"

    def _separated(self, given: Mapping[str, Any], depth: int) -> str:
        tags = " | ".join(self._one({**_mapping(each), "type": "tag"}, depth + 1) for each in _list(given, "tags"))
        separator = given.get("separator")
        if not isinstance(separator, str):
            raise _wrong("tags_with_separator needs a separator", _FORMAT)
        more = "" if given.get("stop_after_first") else f" ({self._constant(separator)} ({tags}))*"
        return f"(({tags}){more})" + ("" if given.get("at_least_one") else "?")

    def _constant(self, text: str) -> str:
        return written(text, self._tokens) if text else '""'

    def _regex(self, given: Mapping[str, Any]) -> str:
        pattern = given.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            raise _wrong("A regex needs a pattern", _FORMAT)
        name = f"PATTERN_{len(self.rules)}"
        self.rules.append(f"{name}: /{_SLASH.sub(_with_slash, pattern)}/")
        return name


# A slash that ends a pattern of Lark, with what escapes it.
_SLASH = re.compile(r"(\\.)|[/\n]", re.DOTALL)


def _with_slash(found: re.Match[str]) -> str:
    return found[1] or ("\\n" if found[0] == "\n" else "\\/")


def _kind(given: Any, depth: int) -> str:
    if isinstance(given, _Until):
        return "until"
    if depth > _MAX_DEPTH:
        raise _wrong(f"The structural tag is nested more than {_MAX_DEPTH} deep", "Nest it less.")
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in _KINDS:
        raise _wrong(f"{str(kind)[:64]!r} is no structural format that is available", _FORMAT)
    return str(kind)


def _elements(given: Mapping[str, Any]) -> list[Any]:
    """The elements of a sequence, where free text and what must follow it are one."""
    made: list[Any] = []
    for each in _list(given, "elements"):
        ends = isinstance(each, Mapping) and each.get("type") in ("const_string", "tag")
        if made and isinstance(made[-1], Mapping) and made[-1].get("type") == "any_text":
            if not ends:
                raise _wrong("Free text in a sequence must be followed by a const_string or a tag", _FORMAT)
            made[-1] = _Until(each)
        else:
            made.append(each)
    return made


def _mapping(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise _wrong("A tag is no object", _FORMAT)
    return given


def _mark(begin: str, triggers: Sequence[str], tokens: Tokens) -> str:
    """The text that begins a tag in an answer: its trigger, or a special token of which the trigger is a part."""
    # The shortest: after a longer one, the tags of a trigger that begins it could not be written.
    trigger = min((one for one in triggers if begin.startswith(one)), key=len, default=None)
    if not trigger:
        raise _wrong(f"The tag {begin[:64]!r} begins with none of the triggers", "Name its beginning in triggers.")
    for stop in range(len(trigger), len(begin) + 1):
        if tokens(begin[:stop]) is not None:
            return begin[:stop]
    return trigger


def _read(text: str) -> _Asked | Mapping[str, Any]:
    """vLLM's form, or xgrammar's format."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong("The structural tag is not JSON", _FORM) from error
    if not isinstance(given, Mapping):
        raise _wrong("The structural tag is no object", _FORM)
    if "format" in given:
        return _mapping(given["format"])
    tags = []
    for one in _list(given, "structures"):
        schema = one.get("schema") if isinstance(one, Mapping) else None
        tags.append(_tag({**_mapping(one), "content": {"type": "json_schema", "json_schema": schema}}))
    return _Asked(tags, _texts(given))


def _triggered(given: Mapping[str, Any]) -> _Asked:
    tags = [_tag(one) for one in _list(given, "tags")]
    return _Asked(tags, _texts(given), bool(given.get("at_least_one")), bool(given.get("stop_after_first")))


def _tag(given: Any) -> _Tag:
    begin, content, end = (_mapping(given).get(name) for name in ("begin", "content", "end"))
    ends = [each for each in (end if isinstance(end, list) else [end]) if isinstance(each, str)]
    if not (isinstance(begin, str) and begin and isinstance(content, Mapping) and ends):
        raise _wrong("A structure needs begin, schema and end, and a tag begin, content and end", _FORMAT)
    if content.get("type") == "json_schema":
        _schema(content.get("json_schema"))
    return _Tag(begin, content, ends)


def _schema(given: Any) -> Any:
    if not isinstance(given, Mapping | bool):
        raise _wrong("A structure needs begin, schema and end", _FORM)
    check(given)
    return given


def _list(given: Mapping[str, Any], name: str) -> list[Any]:
    found = given.get(name)
    if not isinstance(found, list) or not found:
        raise _wrong(f"The structural tag has no list {name}", _FORM)
    return found


def _texts(given: Mapping[str, Any]) -> list[str]:
    found = _list(given, "triggers")
    if not all(isinstance(one, str) and one for one in found):
        raise _wrong("A trigger is no text", _FORM)
    return found


def _wrong(reason: str, remedy: str) -> ParamsError:
    return ParamsError(f"{reason}.", remedy, param="structured_outputs")
