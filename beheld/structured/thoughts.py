"""Grammars that begin behind the thoughts of a model that thinks before it answers."""

from __future__ import annotations

import json
from dataclasses import replace

from beheld.core.params import Thoughts
from beheld.structured.marks import TEXT, Tokens, up_to, written

# Left free, some models write blanks until they run out of tokens.
_BLANKS = "BLANKS: /[ \\n]{1,4}/"


def behind(thoughts: Thoughts, grammar: str, tokens: Tokens) -> str:
    """The grammar of an answer, with thoughts before it; in llguidance's form of several grammars.

    Thoughts that the prompt has begun must end with their mark. Else they may stand at the very beginning, or not at
    all, as the model likes.

    Args:
        thoughts: how they are marked.
        grammar: of the answer, as Lark or as llguidance's JSON of one grammar.
        tokens: of the tokenizer.
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
    """What there may be of thoughts behind this prompt: it may have begun them, or ended them already."""
    end = (prompt or "").rstrip()
    if end.endswith(thoughts.close):
        return None
    return replace(thoughts, begun=end.endswith(thoughts.open))
