"""Structural tags: free text in which the content between given tags follows a schema.

    text <function=get_weather>{"city": "Paris"}</function> text
         trigger
         begin --------------->  schema          end ------->

A trigger is the beginning of the tags that may follow it; after one, only these tags can go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import ParamsError
from beheld.structured.closed import check, json_rule
from beheld.structured.marks import TEXT, Tokens, up_to, words, written

_FORM = 'Send {"structures": [{"begin": TEXT, "schema": SCHEMA, "end": TEXT}], "triggers": [TEXT]}.'


@dataclass(frozen=True)
class _Tag:
    begin: str
    schema: Any
    end: str


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
        text: JSON, vLLM's form with `structures` and `triggers`, or xgrammar's `format` of type "triggered_tags" whose
            contents are schemas.
        tokens: the tokenizer's special tokens.

    Raises:
        ParamsError: it has another form, or a tag begins with no trigger.
        ValueError: a schema may not be used; see `check`.
    """
    asked = _read(text)
    groups: dict[str, list[int]] = {}
    for number, tag in enumerate(asked.tags):
        groups.setdefault(_mark(tag.begin, asked.triggers, tokens), []).append(number)
    ends = [tag.end for tag in asked.tags]
    rules = [TEXT, words(tokens, *groups, *ends)]
    for place, (mark, numbers) in enumerate(groups.items()):
        rules.append(up_to(mark, tokens, f"mark_{place}"))
        rules.append(f"tag_{place}: mark_{place} ({' | '.join(f'rest_{number}' for number in numbers)})")
        for number in numbers:
            tag = asked.tags[number]
            rest, end = tag.begin[len(mark) :], written(tag.end, tokens)
            rules.append(f"rest_{number}: {json.dumps(rest) if rest else ''} {json_rule(tag.schema)} {end}")
    rules.append(f"one: words ({' | '.join(f'tag_{place}' for place in range(len(groups)))})")
    several = "one+ words TEXT" if asked.needed else "one* words TEXT"
    single = "one" if asked.needed else "one | words TEXT"
    rules.append(f"start: {single if asked.single else several}")
    return "\n".join(rules)


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


def _read(text: str) -> _Asked:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong("The structural tag is not JSON", _FORM) from error
    if not isinstance(given, Mapping):
        raise _wrong("The structural tag is no object", _FORM)
    if "format" in given:
        return _of_format(given["format"])
    tags = [_tag(one, one.get("schema") if isinstance(one, Mapping) else None) for one in _list(given, "structures")]
    return _Asked(tags, _texts(given))


def _of_format(given: Any) -> _Asked:
    if not isinstance(given, Mapping) or given.get("type") != "triggered_tags":
        raise _wrong("Of structural formats, only triggered_tags are available", _FORM)
    tags = []
    for one in _list(given, "tags"):
        content = one.get("content") if isinstance(one, Mapping) else None
        if not isinstance(content, Mapping) or content.get("type") != "json_schema":
            raise _wrong("Of the contents of tags, only json_schema is available", _FORM)
        tags.append(_tag(one, content.get("json_schema")))
    return _Asked(tags, _texts(given), bool(given.get("at_least_one")), bool(given.get("stop_after_first")))


def _tag(given: Any, schema: Any) -> _Tag:
    begin, end = (given.get(name) if isinstance(given, Mapping) else None for name in ("begin", "end"))
    if not (isinstance(begin, str) and begin and isinstance(end, str) and end and isinstance(schema, Mapping | bool)):
        raise _wrong("A structure needs begin, schema and end", _FORM)
    check(schema)
    return _Tag(begin, schema, end)


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
