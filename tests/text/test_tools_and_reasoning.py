"""Tool calls and thoughts are read alike however the text is cut, and nothing that is written makes a reader fail."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beheld.text.reasoning import ReasoningSplit, begins_inside
from beheld.text.tools import READERS, Call, form_of

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the \\"sky\\""}}\n</tool_call>'
LOOK = Call("look", '{"at": "the \\"sky\\""}')
MARKS = ("<tool_call>", "</tool_call>", "<tool", "_call>", "<think>", "</think>", "<", "</")
FRAGMENTS = st.sampled_from([*MARKS, '{"name": "f", "arguments": {}}', *'{}[]" \n\\,é', "text"])
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    marks = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


def read(form: str, pieces: list[str]) -> tuple[str, list[Call]]:
    reader = READERS[form]()
    shown, calls = "", []
    for piece in pieces:
        text, found = reader.push(piece)
        shown += text
        calls += found
    text, found = reader.finish()
    return shown + text, calls + found


def split(pieces: list[str], *, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplit(inside=inside)
    told = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(t for t, _ in told), "".join(a for _, a in told)


@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"),
    [
        ("hermes", CALL, "", [LOOK]),
        ("hermes", f"I look.\n{CALL}\n{CALL}\n", "I look.", [LOOK, LOOK]),
        ("hermes", CALL.removesuffix("</tool_call>"), "", [LOOK]),
        ("hermes", "<tool_call>no</tool_call> after", "<tool_call>no</tool_call> after", []),
        ("hermes", "a < b <tool", "a < b <tool", []),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "", [Call("f", '{"x": 1}')]),
        ("json", ' {"name": "f", "parameters": {"x": 1}}', "", [Call("f", '{"x": 1}')]),
        ("json", '[{"name": "f"}, {"name": "g"}]', "", [Call("f", "{}"), Call("g", "{}")]),
        ("json", '{"x": 1}', '{"x": 1}', []),
        ("json", "It is {x}.", "It is {x}.", []),
    ],
)
def test_calls_are_found(form: str, text: str, shown: str, calls: list[Call]) -> None:
    assert read(form, [text]) == (shown, calls)
    assert read(form, list(text)) == (shown, calls)
    for call in calls:
        json.loads(call.arguments)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 1000), max_size=6), st.sampled_from(sorted(READERS)))
@pytest.mark.case(51)
def test_how_the_text_is_cut_does_not_matter(text: str, places: list[int], form: str) -> None:
    whole = read(form, [text])
    assert read(form, cut(text, places)) == whole
    assert read(form, list(text)) == whole


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n\nyes\n</think>\n\nBlue.", False, ("hm\n\nyes", "Blue.")),
        ("hm</think>Blue.", True, ("hm", "Blue.")),
        ("Blue.", False, ("", "Blue.")),
        ("Blue. <think>x</think>", False, ("", "Blue. <think>x</think>")),
        ("<think>never ends ", False, ("never ends", "")),
        ("<think></think>", False, ("", "")),
        (" <thin", False, ("", " <thin")),
    ],
)
def test_thoughts_are_told_apart(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split([text], inside=inside) == expected
    assert split(list(text), inside=inside) == expected


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 1000), max_size=6), st.booleans())
def test_how_thoughts_are_cut_does_not_matter(text: str, places: list[int], inside: bool) -> None:
    assert split(cut(text, places), inside=inside) == split([text], inside=inside)


@pytest.mark.parametrize("form", sorted(READERS))
@pytest.mark.parametrize("text", ["<tool_call>", "<tool_call" * 10, "</tool_call>", "{", "[", "\n", "<"])
@pytest.mark.case(51)
def test_reading_is_linear(form: str, text: str) -> None:
    begin = time.perf_counter()
    long = text * 20_000
    for size in (1, len(long)):
        read(form, [long[k : k + size] for k in range(0, len(long), size)])
    assert time.perf_counter() - begin < 6.0


def test_forms_and_beginnings_are_recognised() -> None:
    assert form_of("... <tool_call> ...") == "hermes"
    assert form_of("{{ messages }}") is None
    assert form_of(None) is None
    assert begins_inside("assistant\n<think>\n")
    assert not begins_inside("assistant\n")
    assert not begins_inside(None)
