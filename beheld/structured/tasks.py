"""What the processes that rehearse grammars do: compile one, and find its first mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from beheld.core.params import Grammar, Thoughts
from beheld.sandbox.codec import Codec
from beheld.structured.compile import Compiler


@dataclass(frozen=True)
class Settings:
    """The tokenizer, as Compiler takes it."""

    tokenizer_json: str | None
    vocab_size: int
    eos_ids: frozenset[int]


CODEC = Codec((Settings, Grammar, Thoughts))


def load(settings: Settings) -> Callable[[Grammar], None]:
    """The function that rehearses; the tokenizer is loaded now.

    Raises:
        ParamsError: grammars are not available for this tokenizer.
    """
    compiler = Compiler(lambda: settings.tokenizer_json, settings.vocab_size, settings.eos_ids)
    compiler.prepare()

    def rehearse(grammar: Grammar) -> None:
        # Nothing is kept: a worker that stays small can be told from one that grows.
        compiler.compile(grammar)

    return rehearse
