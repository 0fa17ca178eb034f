"""Grammars that after reasoning, of every kind and with every spelling of the marks."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from beheld.core.structured_outputs import Grammar, ReasoningFormat
from beheld.structured.compile import Compiler
from beheld.structured.reasoning import reasoning_after
from tests import tiny

BEGUN, FREE = (ReasoningFormat("<think>", "</think>", begun) for begun in (True, False))
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


def complete(way: str, reasoning: ReasoningFormat, kind: str, text: str) -> bool:
    """True if the text is a whole answer."""
    tokenizer, found = compiler(way)
    matcher = found.matcher(Grammar(kind, ANSWERS[kind][0], reasoning))
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
    assert complete(way, FREE, kind, answer), "it may do without reasoning"
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
        found = reasoning_after(FREE, prompt)
        assert found is not None
        assert found.begun is begun
    assert reasoning_after(FREE, "Hi<think>\n\n</think>\n\n") is None


TIDES = '{"name": "tides", "%s": {}}'
# A form, a call in it, and one that is not held to its schema.
CALLS = {
    "hermes": (f"<tool_call>\n{TIDES % 'arguments'}\n</tool_call>", '<tool_call>\n{"name": "rain'),
    "glm45": ("<tool_call>tides\n</tool_call>", "<tool_call>rain"),
    "mistral": ("[TOOL_CALLS]tides[ARGS]{}", "[TOOL_CALLS]rain"),
    "llama3_json": (TIDES % "parameters", '{"name": "rain'),
    "pythonic": ("[tides()]", "[tides(x"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", sorted(CALLS))
def test_calls_leave_room_for_thoughts_and_are_held_behind_them(form: str, way: str) -> None:
    tokenizer, found = compiler(way)
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    text = json.dumps({"form": form, "tools": [{"name": "tides", "schema": schema}]})
    call, wrong = CALLS[form]

    def fits(reasoning: ReasoningFormat | None, answer: str) -> bool:
        matcher = found.matcher(Grammar("calls", text, reasoning))
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return bool(matcher.try_consume_tokens(ids) == len(ids))

    for reasoning, begin in (
        (BEGUN, "Hm {\n</think>\n\n"),
        (FREE, "<think>\nHm {\n</think>\n\n"),
        (FREE, ""),
        (None, ""),
    ):
        for good in (call, "No call."):
            assert fits(reasoning, begin + good), (begin, good)
        assert not fits(reasoning, begin + wrong), begin
    # Tokens that are no text stand in words, without a reasoning format.
    if form not in ("llama3_json", "pythonic") or way == "spelled":
        assert fits(None, "<think>Hm</think>No call.")
    assert fits(None, "Hm<think>Hm</think>")
    assert not fits(BEGUN, f"Hm{call}</think>{wrong}")
    if way != "spelled":
        # What texts do not show hides no call.
        assert not fits(None, f"<think>{wrong}")
        assert form not in ("llama3_json", "pythonic") or not fits(None, f"{wrong[0]}<think>{wrong[1:]}")
