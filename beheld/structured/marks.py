"""Marks in grammars: what some tokenizers write as one token of its own, and others spell."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

# In llguidance's form of Lark. No token of its own kind stands in a text.
TEXT = "TEXT: /(.|\\n)*/"

Tokens = Callable[[str], int | None]


def tokens_of(tokenizer: Any) -> Tokens:
    """Tells of a mark the id of the token that it is; None of one that is spelled like any text.

    Args:
        tokenizer: an llguidance.LLTokenizer. It takes some added tokens for special whatever their tokenizer says of
            them, "<tool_call>" for example, and never lets those pass as text: what it does decides.
    """

    def found(mark: str) -> int | None:
        ids = tokenizer.tokenize_str(mark, parse_special=True)
        return ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None

    return found


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
