"""Marks in grammars: what some tokenizers write as one token of its own, and others spell."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

# In llguidance's form of Lark. No token of its own kind stands in a text.
TEXT = "TEXT: /(.|\\n)*/"


class Tokens:
    """The tokens of a tokenizer that are no text.

    Args:
        tokenizer: an llguidance.LLTokenizer. It takes some added tokens for special whatever their tokenizer says of
            them, "<tool_call>" for example, and never lets those pass as text: what it does decides.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, mark: str) -> int | None:
        """The id of the token that a mark is; None of one that is spelled like any text."""
        ids = self._tokenizer.tokenize_str(mark, parse_special=True)
        return ids[0] if len(ids) == 1 and self._tokenizer.is_special_token(ids[0]) else None

    @cached_property
    def _special(self) -> list[int]:
        """All of them that have a name: what only fills a vocabulary up has none."""
        found = filter(self._tokenizer.is_special_token, range(self._tokenizer.vocab_size))
        names = ((token, self._tokenizer.decode_bytes([token])) for token in found)
        return [token for token, name in names if name not in (b"", f"<[{token}]>".encode())]

    def others(self, *marks: str) -> str | None:
        """Any of them but these marks and what ends an answer, as an expression; None if there are no others.

        Models write some into their words: around thoughts, boxes or names.
        """
        without = {self(mark) for mark in marks} | set(self._tokenizer.eos_tokens)
        # Some vocabularies hold thousands in a row.
        spans: list[list[int]] = []
        for token in self._special:
            if token in without:
                continue
            if spans and spans[-1][1] == token - 1:
                spans[-1][1] = token
            else:
                spans.append([token, token])
        return f"<[{','.join(f'{first}-{last}' for first, last in spans)}]>" if spans else None


def written(mark: str, tokens: Tokens) -> str:
    """A mark, as an expression."""
    token = tokens(mark)
    return json.dumps(mark) if token is None else f"({json.dumps(mark)} | <[{token}]>)"


def up_to(mark: str, tokens: Tokens, rule: str, text: str = "TEXT") -> str:
    """The rule `rule`: a text and the mark behind it, the first that comes, in either way to write it.

    Args:
        mark: that ends it.
        tokens: of the tokenizer.
        rule: its name.
        text: the terminal that the text follows.
    """
    token = tokens(mark)
    lines = [f"{rule}_spelled[lazy]: {text} {json.dumps(mark)}"]
    lines.append(f"{rule}: {rule}_spelled" + ("" if token is None else f" | {text} <[{token}]>"))
    return "\n".join(lines)
