"""Grammars that follow the optional reasoning before an answer."""

from __future__ import annotations

import json
from dataclasses import replace

from beheld.core.params import Thoughts
from beheld.structured.marks import TEXT, Tokens, up_to, written

# Without a limit, some models write spaces until they run out of tokens.
_BLANKS = "BLANKS: /[ \\n]{1,4}/"


def behind(thoughts: Thoughts, grammar: str, tokens: Tokens) -> str:
    """The grammar of an answer with reasoning before it, in llguidance's format of several grammars.

    If the prompt has opened the reasoning, it must end with its closing mark. Otherwise the model may reason at the
    very beginning, or not at all.

    Args:
        thoughts: the reasoning's format.
        grammar: the answer's grammar, as Lark or as llguidance's JSON of one grammar.
        tokens: the tokenizer's special tokens.
    """
    rest = f"{'thinking BLANKS?' if thoughts.begun else '(opening thinking BLANKS?)?'} @answer"
    lines = [f"start: {rest}", TEXT, _BLANKS, up_to(thoughts.close, tokens, "thinking")]
    if not thoughts.begun:
        lines.append(f"opening: BLANKS? {written(thoughts.open, tokens)}")
    try:
        ((answer),) = json.loads(grammar)["grammars"]
    except (ValueError, KeyError, TypeError):
        answer = {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, {**answer, "name": "answer"}]})


def after(thoughts: Thoughts, prompt: str | None) -> Thoughts | None:
    """The reasoning that may follow this prompt: the prompt may have opened it, or closed it already."""
    end = (prompt or "").rstrip()
    if end.endswith(thoughts.close):
        return None
    return replace(thoughts, begun=end.endswith(thoughts.open))
