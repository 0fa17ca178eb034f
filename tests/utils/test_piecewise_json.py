"""JSON that is read in steps: the same values and the same errors, and no step that keeps other threads waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beheld.utils import bounded_json, piecewise_json
from beheld.utils.bounded_json import JsonBounds, JsonError
from tests.server.slowness import best, longest_wait, slowness

_BOUNDS = JsonBounds()
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def outcome(read: Callable[[bytes, JsonBounds], Any], body: bytes, bounds: JsonBounds = _BOUNDS) -> Any:
    """The value, with its types; or the words of the error."""
    try:
        return repr(read(body, bounds))
    except (JsonError, UnicodeDecodeError) as error:
        return error.reason if isinstance(error, JsonError) else "It is not valid JSON."


def whole(body: bytes, bounds: JsonBounds) -> Any:
    """As small bodies are read."""
    return bounded_json.parse(body.decode(), bounds)


def stepwise(body: bytes, bounds: JsonBounds) -> Any:
    """In steps so small that texts, escapes, characters and blanks are cut everywhere."""
    with mock.patch.object(piecewise_json, "_WINDOW", 9):
        return piecewise_json.parse(body, bounds)


@given(_VALUES, st.booleans(), st.sampled_from([None, 12]))
def test_it_reads_what_the_standard_library_writes(value: Any, plain: bool, indent: int | None) -> None:
    try:
        body = json.dumps(value, ensure_ascii=not plain, indent=indent).encode()
    except UnicodeEncodeError:
        return
    assert outcome(stepwise, body) == outcome(whole, body)


@given(_VALUES, st.data())
def test_of_what_is_damaged_it_says_the_same(value: Any, data: st.DataObject) -> None:
    body = bytearray(json.dumps(value, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass"))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place : place + data.draw(st.integers(0, 3))] = data.draw(
        st.sampled_from(
            [
                b"",
                b'"',
                b"\\",
                b"\\u",
                b"[",
                b"}",
                b",",
                b":",
                b"\xff",
                b"\xed\xa0\x80",
                b"\0",
                b"0",
                b"-",
                b"\xef\xbb\xbf",
            ]
        )
    )
    assert outcome(stepwise, bytes(body)) == outcome(whole, bytes(body))


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b" ",
            b"{",
            b'{"a"',
            b'{"a":',
            b'{"a":1',
            b'{"a":1,}',
            b"[1,]",
            b"[,]",
            b"1 2",
            b"[1 2]",
            b"{1:2}",
            b"tru",
        ),
        *(b"01", b"1.", b".5", b"1e", b"-", b"+1", b"1e5", b"-0", b"-0.0", b"1E-7", b"1e999", b"9" * 33, b"9" * 32),
        *(
            b"NaN",
            b"Infinity",
            b"[-Infinity]",
            b"\xef\xbb\xbf1",
            b'"\xc3"',
            b'"\xc3\xa4"',
            b'"\t"',
            b'"\\x"',
            b'"\\u12"',
        ),
        *(b'"\\ud83d\\ude00"', b'"\\ud83d"', b'"\\ude00\\ud83d"', b'"\\ud83d\\ud83d\\ude00"', b'"a\\ud83dabcdef"'),
        *(
            b'{"a":1,"a":2}',
            b'{"\\u0061":1,"a":2}',
            b"[" * 64 + b"]" * 64,
            b"[" * 65 + b"]" * 65,
            b"[" * 64 + b"1" + b"]" * 64,
        ),
        *(b'"' + b"x" * number + b"\\ud83d\\ude00" + b'"' for number in range(10)),
        *(b'"' + b"x" * number + b"\\\\" * 7 + "\U0001f600\u00e9".encode() + b'"' for number in range(10)),
    ],
)
def test_edges(body: bytes) -> None:
    assert outcome(stepwise, body) == outcome(whole, body)


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"[1,1,1,1,1]", "values"), (b'[{"a":1,"b":2},{"c":3}]', "keys"), (b"[[],[],[]]", "lists and objects")],
)
def test_what_it_counts_is_the_same(body: bytes, words: str) -> None:
    bounds = JsonBounds(keys=2, containers=3, values=3)
    assert words in outcome(stepwise, body, bounds)
    assert words in outcome(whole, body, bounds)
    wide = JsonBounds(keys=3, containers=4, values=4)
    assert outcome(stepwise, body, wide) == outcome(whole, body, wide)


def test_one_wide_character_makes_no_long_text_four_times_as_wide() -> None:
    with pytest.raises(JsonError, match="take much memory"):
        piecewise_json.parse(b'"' + b"a" * (20 << 20) + "\U0001f600".encode() + b'"', _BOUNDS)
    assert len(piecewise_json.parse(b'"' + b"a" * (70 << 20) + b'"', _BOUNDS)) == 70 << 20


@pytest.mark.case(101)
@pytest.mark.parametrize("piece", ["x y", "\u4f60", "\U0001f600", '"', "\u00e9"])
def test_a_body_of_60_mb_keeps_no_thread_waiting(piece: str) -> None:
    """The standard library kept the interpreter for up to 300 ms."""
    one = json.dumps(piece, ensure_ascii=False).encode()[1:-1]
    body = bytearray(b'{"a":"' + one * ((60 << 20) // len(one)) + b'"}')
    bound = 0.06 * slowness()
    assert best(lambda: longest_wait(lambda: piecewise_json.parse(body, _BOUNDS)), bound) < bound


@pytest.mark.case(92)
def test_a_key_of_megabytes_is_refused_before_it_is_hashed() -> None:
    """To hash one of 60 MB kept all threads waiting for 100 ms."""
    long = b"k" * piecewise_json.MAX_KEY_BYTES
    assert piecewise_json.parse(b'{"' + long + b'":1}', _BOUNDS) == {long.decode(): 1}
    with pytest.raises(JsonError, match="A key has more than 1048576 characters"):
        piecewise_json.parse(b'{"' + long + b'k":1}', _BOUNDS)


def test_what_is_checked_stands_anywhere_in_a_long_list() -> None:
    """Runs of numbers are passed over; a half of a character or a deep list among them is not."""
    numbers = "1, " * 40_000
    for wrong in ('"\\ud800"', "[" * 65 + "]" * 65):
        for text in (f"[{numbers}{wrong}]", f"[{wrong}, {numbers}2]", f"[{numbers}{wrong}, {numbers}null]"):
            with pytest.raises(JsonError):
                bounded_json.parse(text, _BOUNDS)
    assert bounded_json.parse(f'[{numbers}"a", [[2]]]', _BOUNDS)[-2:] == ["a", [[2]]]
