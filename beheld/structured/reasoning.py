"""Grammars that follow the optional reasoning before an answer."""

from __future__ import annotations

import json
from dataclasses import replace

from beheld.core.structured_outputs import ReasoningFormat
from beheld.structured.marks import TEXT, Tokens, up_to, written

# Without a limit, some models write spaces until they run out of tokens.
_BLANKS = "BLANKS: /[ \\n]{1,4}/"


def with_reasoning(reasoning: ReasoningFormat, grammar: str, tokens: Tokens) -> str:
    """The grammar of an answer with reasoning before it, in llguidance's format of several grammars.

    If the prompt has opened the reasoning, it must end with its closing mark. Otherwise the model may reason at the
    very beginning, or not at all.

    Args:
        reasoning: the reasoning's format.
        grammar: the answer's grammar, as Lark or as llguidance's JSON of one grammar.
        tokens: the tokenizer's special tokens.
    """
    rest = f"{'thinking BLANKS?' if reasoning.begun else '(opening thinking BLANKS?)?'} @answer"
    lines = [f"start: {rest}", TEXT, _BLANKS, up_to(reasoning.close, tokens, "thinking")]
    if not reasoning.begun:
        lines.append(f"opening: BLANKS? {written(reasoning.open, tokens)}")
    try:
        ((answer),) = json.loads(grammar)["grammars"]
    except (ValueError, KeyError, TypeError):
        answer = {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, {**answer, "name": "answer"}]})


def reasoning_after(reasoning: ReasoningFormat, prompt: str | None) -> ReasoningFormat | None:
    """The reasoning that may follow this prompt: the prompt may have opened it, or closed it already."""
    end = (prompt or "").rstrip()
    if end.endswith(reasoning.close):
        return None
    return replace(reasoning, begun=end.endswith(reasoning.open))
