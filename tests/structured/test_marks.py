"""Tokens that are no text, as grammars name them."""

from __future__ import annotations

from beheld.structured.marks import Tokens, up_to, written


class Tokenizer:
    """Ten tokens, of which 4 to 6 and 8 are special, and 9 ends answers."""

    vocab_size = 10
    eos_tokens = (9,)

    def tokenize_str(self, text: str, *, parse_special: bool) -> list[int]:
        assert parse_special
        return {"<a>": [5], "b": [1], "cd": [1, 2]}[text]

    def is_special_token(self, token: int) -> bool:
        return token in (4, 5, 6, 7, 8, 9)

    def decode_bytes(self, tokens: list[int]) -> bytes:
        (token,) = tokens
        # The seventh only fills the vocabulary up.
        return b"<[7]>" if token == 7 else b"<%d>" % token


def test_marks_are_tokens_or_letters() -> None:
    tokens = Tokens(Tokenizer())
    assert [tokens(mark) for mark in ("<a>", "b", "cd")] == [5, None, None]
    assert written("<a>", tokens) == '("<a>" | <[5]>)'
    assert written("cd", tokens) == '"cd"'
    assert up_to("cd", tokens, "x") == 'x_spelled[lazy]: TEXT "cd"\nx: x_spelled'
    assert up_to("<a>", tokens, "x", "Y") == 'x_spelled[lazy]: Y "<a>"\nx: x_spelled | Y <[5]>'


def test_the_others_are_spans_without_marks_and_ends() -> None:
    tokens = Tokens(Tokenizer())
    assert tokens.others() == "<[4-6,8-8]>"
    assert tokens.others("<a>", "b") == "<[4-4,6-6,8-8]>"
    none = Tokenizer()
    none.eos_tokens = (4, 5, 6, 8, 9)  # type: ignore[assignment]
    assert Tokens(none).others() is None
