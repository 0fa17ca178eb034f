"""Marks in grammars: some tokenizers have one token for a mark, others spell it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

# llguidance's Lark. Text never contains special tokens.
TEXT = "TEXT: /(.|\\n)*/"


class Tokens:
    """The special tokens of a tokenizer.

    Args:
        tokenizer: an llguidance.LLTokenizer. Whatever the tokenizer itself says, llguidance treats some added tokens as
            special, such as "<tool_call>", and never allows them in text. This class follows llguidance.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, mark: str) -> int | None:
        """The id of the mark's token; None if the mark is spelled like ordinary text."""
        ids = self._tokenizer.tokenize_str(mark, parse_special=True)
        return ids[0] if len(ids) == 1 and self._tokenizer.is_special_token(ids[0]) else None

    def pieces(self, text: str) -> list[str | int]:
        """The text, with the ids of its special tokens in place of what they stand for."""
        whole = self(text)
        if whole is not None:
            return [whole]
        made: list[str | int] = []
        for token in self._tokenizer.tokenize_str(text, parse_special=True):
            if self._tokenizer.is_special_token(token):
                before, name, after = text.partition(self._tokenizer.decode_bytes([token]).decode(errors="replace"))
                if name:
                    made += [before, token] if before else [token]
                    text = after
        return [*made, text] if text else made

    @cached_property
    def _special(self) -> list[int]:
        """All special tokens with a name; tokens that only pad a vocabulary have none."""
        found = filter(self._tokenizer.is_special_token, range(self._tokenizer.vocab_size))
        names = ((token, self._tokenizer.decode_bytes([token])) for token in found)
        return [token for token, name in names if name not in (b"", f"<[{token}]>".encode())]

    def others(self, *marks: str) -> str | None:
        """Any special token except these marks and the end of an answer, as an expression; None if there are no others.

        Models write some of them into their text: around reasoning, boxes or names.
        """
        without = {self(mark) for mark in marks} | set(self._tokenizer.eos_tokens)
        # Some vocabularies hold thousands of consecutive ones.
        spans: list[list[int]] = []
        for token in self._special:
            if token in without:
                continue
            if spans and spans[-1][1] == token - 1:
                spans[-1][1] = token
            else:
                spans.append([token, token])
        return f"<[{','.join(f'{first}-{last}' for first, last in spans)}]>" if spans else None


def words(tokens: Tokens, *marks: str) -> str:
    """The rule of words before a mark or the end: any text and any special token except the marks."""
    others = tokens.others(*marks)
    return 'words: ""' if others is None else f"words: (TEXT {others})*"


def written(mark: str, tokens: Tokens) -> str:
    """A mark as an expression, whether its special tokens are written as such or spelled."""
    pieces = tokens.pieces(mark)
    spelled = json.dumps(mark)
    return spelled if pieces == [mark] else f"({spelled} | {_joined(pieces)})"


def _joined(pieces: Sequence[str | int]) -> str:
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces)


def up_to(mark: str, tokens: Tokens, rule: str, text: str = "TEXT") -> str:
    """The rule `rule`: a text up to and including the first occurrence of the mark, in either spelling.

    Args:
        mark: the mark.
        tokens: the tokenizer's special tokens.
        rule: the rule's name.
        text: the terminal of the text.
    """
    first, *rest = pieces = tokens.pieces(mark)
    lines = [f"{rule}_spelled[lazy]: {text} {json.dumps(mark)}"]
    if pieces == [mark]:
        return "\n".join([*lines, f"{rule}: {rule}_spelled"])
    if isinstance(first, str):
        # The text ends with what the mark has before its first special token.
        before = f"{rule.upper()}_BEFORE"
        lines.append(f"{before}: {text} {json.dumps(first)}")
        other = f"{before} {_joined(rest)}"
    else:
        other = f"{text} {_joined(pieces)}"
    return "\n".join([*lines, f"{rule}: {rule}_spelled | {other}"])
