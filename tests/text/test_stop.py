"""Stop strings are found wherever a text is cut, and nothing that could begin one is shown too early."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from beheld.text.stop import StopFinder
from tests.memory import peak_of_objects

LETTERS = st.sampled_from(list("ab\n"))
TEXTS = st.text(LETTERS, max_size=30)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By the definition: the string that ends first, then the one named first."""
    for stop in range(1, len(text) + 1):
        for string in stops:
            if text[:stop].endswith(string):
                return text[: stop if include else stop - len(string)], string
    return text, None


def cut(text: str, data: st.DataObject) -> list[str]:
    pieces = []
    while text:
        size = data.draw(st.integers(0, len(text)))
        pieces.append(text[:size])
        text = text[size:]
        if size == 0:
            pieces.append(text[:1])
            text = text[1:]
    return pieces


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, stops=STOPS, include=st.booleans(), data=st.data())
@example(text="aab", stops=["ab", "aab"], include=False, data=None)
def test_found_at_any_split(text: str, stops: list[str], include: bool, data: st.DataObject | None) -> None:
    finder = StopFinder(stops, include=include)
    shown = ""
    for piece in list(text) if data is None else cut(text, data):
        certain, found = finder.push(piece)
        shown += certain
        if found is not None:
            break
    else:
        found = None
        shown += finder.finish()
    assert (shown, found) == reference(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=STOPS)
def test_nothing_is_held_that_cannot_begin_a_stop_string(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    certain, found = finder.push(text)
    if found is None:
        held = text[len(certain) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = (text[len(text) - size :] for size in range(len(held) + 1, len(text) + 1))
        assert not any(stop.startswith(end) for end in longer for stop in stops)


def test_unwatched_strings_pass_but_may_begin_one() -> None:
    finder = StopFinder(["END"])
    assert finder.push("xEND", watch=False) == ("xEND", None)
    assert finder.push("EN", watch=False) == ("", None)
    assert finder.push("Dy") == ("", "END")


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopFinder([]).push("abc") == ("abc", None)


@pytest.mark.case(128)
def test_long_strings_cost_what_has_matched_of_them() -> None:
    """64 of 4,000 characters took 9 MB and 50 ms for each answer before it had a token: 64 answers held the server for
    3 s."""
    stops = ["a" * number + "~" for number in range(4000, 4064)]
    with peak_of_objects() as above:
        finder = StopFinder(stops)
        assert finder.push("bcd") == ("bcd", None)
    assert above[0] < 64 << 10
    assert finder.push("a" * 10) == ("", None)
    assert finder.push("b") == ("a" * 10 + "b", None)
    assert finder.push("a" * 4010 + "~!") == ("a" * 10, "a" * 4000 + "~")
