"""Grammars of texts in JSON strings: they take the JSON of a text where the grammar itself takes the text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from beheld.utils.quoted_grammar import of_regex, quoted

TOKENIZER = LLTokenizer("byte")
CASES = [
    ('start: "say \\"hi\\"" | "a\\nb"', ['say "hi"', "a\nb"], ["say hi", "a b", "a\\nb"]),
    ("start: /[^x]+/", ['a"\\\n\t/é', "\x01", "b"], ["x", "axb", ""]),
    ("start: /.*/", ['{"a": "\\"}', "", "é"], ["two\nlines"]),
    ("start: /.*/s", ["two\nlines", '"'], []),
    (r'start: /"(\\.|[^"\\])*"/', [r'"a\"b"', '""', '"é"'], ['"', r'"\"', "a"]),
    (r"start: WORD (/\s+/ WORD)* // words" "\n" r"WORD: /\w{2,3}/", ["ab cd", "ab\n\tabc"], ["a", "ab  ", "abcde"]),
    ('start: "SELECT"i " " NAME\nNAME: /[a-z]+/', ["select x", "SeLECT ab"], ["select", "selectx"]),
    ('start: one+\none: "x" | "\\\\"\n%ignore / +|\\n/', ["x x", "\\\nx"], ["y", " "]),
    ("%import common.WS\n%import common (INT, CNAME)\nstart: CNAME WS INT", ["a_1\n\t 42"], ["1 1", "ab", "a 1 "]),
    ("%import common.ESCAPED_STRING -> TEXT\nstart: TEXT", [r'"a\\"', '"é"'], ['"', '"\\"']),
    (r"start: /[\n\r]+|\x41\x{42}/", ["\n\r", "AB"], ["A", "n"]),
    ('start: /["一-龥]+/', ['一"', '"'], ["a"]),
    (r"start: /[^\S]/", [" ", "\n"], ["\x1c", "a"]),
    (r"start: /[a||\x{22}-\x23]|[]\-\n]/", ['"', "#", "|", "]", "-", "\n"], ["^", "\\"]),
    (r"start: /(?s:a)./", ["ab", 'a"'], ["a\n"]),
    (r"start: /\(?s./", ['s"', "(sx"], ["s\n", "x"]),
    ('start: A~1..2\nA: " " .. "~"', ['"\\', "a"], ["\n", "é"]),
    ('start: a{1,2}\na: "x\\""', ['x"', 'x"x"'], ["x"]),
    (r"start: /\nb./i", ["\nB\t", '\nb"'], ["nb\n", "\\Nbc"]),
    (of_regex(r"^\d{3}/[a-z\]]+$"), ["123/a]"], ["12/a", "123/a/"]),
    (of_regex(r"a\/b|(?:\"|\\){2}"), ["a/b", '"\\'], ["ab", '"']),
]


def takes(grammar: str, text: str) -> bool:
    matcher: Any = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_bytes(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(("grammar", "right", "wrong"), CASES)
def test_the_json_of_a_text_is_taken_where_the_text_is(grammar: str, right: list[str], wrong: list[str]) -> None:
    held = f'start: "\\"" %lark {{\n{quoted(grammar)}\n}} "\\""'
    for text in (*right, *wrong):
        assert takes(grammar, text) == (text in right), text
        assert takes(held, json.dumps(text, ensure_ascii=False)) == (text in right), text
    assert not takes(held, '"unclosed')


@pytest.mark.parametrize(
    "grammar",
    [
        r"start: /\bword/",
        "start: /(?=a)./",
        r"start: /\p{Lu}/",
        "start: /[a[b]]/",
        "start: /^a/",
        "start: %json {}",
        'start: "\\""i',
        "%import common.NO\nstart: NO",
        "%import python.NAME\nstart: NAME",
        "start: A & ~B",
        "start: /a/x",
        'start: "\\q"',
        "start: <|end|>",
        'start: /["&&a]/',
        r"start: /[\w--a]/",
        'start: "a" }\nstart: "b" {',
        'start: "a" {',
        "start: /" + "." * 10_000 + "/",
        'start: "\\u00".."z"',
    ],
)
def test_what_has_no_form_in_json_is_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match="has no form in JSON"):
        quoted(grammar)


@pytest.mark.parametrize("regex", [".*", r"\n\x1f[^a]"])
def test_escapes_are_as_json_writes_them_whatever_the_case_of_letters(regex: str) -> None:
    held = f'start: "\\"" %lark {{\n{quoted(f"start: /{regex}/is")}\n}} "\\""'
    assert takes(held, r'"\n\u001fB"')
    for wrong in (r'"\N\u001fB"', r'"\n\u001FB"', r'"\n\U001fB"'):
        assert not takes(held, wrong), wrong


@pytest.mark.parametrize("part", [".", r"[\n]", "[ab]", r"(?s:", r"\s|"])
def test_long_grammars_take_little_time(part: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="has no form in JSON"):
        quoted(f"start: /{part * ((1 << 16) // len(part))}\\b/")
    assert time.process_time() - began < 1
