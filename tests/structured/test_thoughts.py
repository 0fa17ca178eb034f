"""Grammars that begin behind thoughts, of whatever kind they are and however the marks are written."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from beheld.core.params import Grammar, StructuredOutputs, Thoughts
from beheld.structured.compile import Compiler, grammar_of
from beheld.structured.thoughts import after
from tests import tiny

BEGUN, FREE = (Thoughts("<think>", "</think>", begun) for begun in (True, False))
ANSWERS = {
    "json": ('{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}', '{"a": true}'),
    "regex": ("[ab]{3}/", "aba/"),
    "grammar": ('start: one\none: "yes" | "no"', "no"),
}
WAYS = ("spelled", "added", "special")


@cache
def compiler(way: str) -> tuple[Any, Compiler]:
    made = AutoTokenizer.from_pretrained(str(tiny.checkpoint("qwen2")))
    if way != "spelled":
        marks = [AddedToken(mark, special=way == "special", normalized=False) for mark in ("<think>", "</think>")]
        made.add_tokens(marks, special_tokens=way == "special")
    return made, Compiler(made.backend_tokenizer.to_str, len(made), frozenset({made.eos_token_id}))


def complete(way: str, thoughts: Thoughts, kind: str, text: str) -> bool:
    """True if the text is a whole answer."""
    tokenizer, found = compiler(way)
    matcher = found.matcher(Grammar(kind, ANSWERS[kind][0], thoughts))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", sorted(ANSWERS))
def test_it_begins_behind_the_mark(kind: str, way: str) -> None:
    answer = ANSWERS[kind][1]
    for text in (f"</think>{answer}", f"Hm {{ \u00e4\n[]\n</think>\n\n{answer}"):
        assert complete(way, BEGUN, kind, text), text
        assert complete(way, FREE, kind, f"<think>\n{text}"), text
    assert complete(way, FREE, kind, f"\n<think></think>{answer}")
    assert complete(way, FREE, kind, answer), "it may do without thoughts"
    for text in (answer, f"</think>x{answer}", f"Hm</think>{answer}x", "Hm", "Hm</think>"):
        assert not complete(way, BEGUN, kind, text), text
    for text in ("Hm", f"Hm {answer}", f"Hm<think></think>{answer}", f"<think>{answer}"):
        assert not complete(way, FREE, kind, text), text


def test_what_the_prompt_has_begun_or_ended() -> None:
    for prompt, begun in (
        ("Hi", False),
        ("Hi<think>", True),
        ("Hi<think>\n\n", True),
        ("<think>no</think>Hi", False),
        (None, False),
    ):
        found = after(FREE, prompt)
        assert found is not None
        assert found.begun is begun
    assert after(FREE, "Hi<think>\n\n</think>\n\n") is None


def test_calls_leave_room_for_thoughts_that_the_model_begins() -> None:
    calls = StructuredOutputs(calls='{"form": "hermes", "tools": []}')
    assert grammar_of(calls, FREE).thoughts is None
    assert grammar_of(calls, BEGUN).thoughts == BEGUN
    assert grammar_of(StructuredOutputs(choice=["a"]), FREE).thoughts == FREE
