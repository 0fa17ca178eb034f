"""Text to ids: as a call of the tokenizer gives them, whatever calls of others have left in it."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from beheld.inputs import tokens
from beheld.inputs.tokens import PromptTokenizer
from tests import tiny

TEXTS = ("Hi", "", "What is  in this picture?\n", "naïve 你好 — 3.14 <|im_end|></s>", "a " * 300)


def of(family: str) -> PromptTokenizer:
    return PromptTokenizer(AutoTokenizer.from_pretrained(tiny.checkpoint(family)), {})


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "gemma3", "mistral3", "llava"])
def test_short_texts_have_the_ids_of_a_call(family: str, special: bool) -> None:
    made = of(family)
    assert tokens._usual(made.inner)
    for text in TEXTS:
        ids = made.inner(text, add_special_tokens=special, truncation=False)["input_ids"]
        assert made.encode(text, add_special_tokens=special) == ids


@pytest.mark.parametrize("left", [{"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 400}])
def test_what_a_user_s_call_left_behind_changes_nothing(left: dict[str, object]) -> None:
    made = of("qwen2_5_vl")
    wanted = [made.encode(text, add_special_tokens=True) for text in TEXTS]
    made.inner("some text of theirs", **left)
    assert not tokens._unset(made.inner.backend_tokenizer)
    assert [made.encode(text, add_special_tokens=True) for text in TEXTS] == wanted


def test_one_that_splits_special_tokens_does_so() -> None:
    made = of("qwen2_5_vl")
    whole = made.encode("<|im_end|>", add_special_tokens=False)
    made.inner.split_special_tokens = True
    assert len(whole) == 1
    assert len(made.encode("<|im_end|>", add_special_tokens=False)) > 1
    made.inner.split_special_tokens = False
    assert made.encode("<|im_end|>", add_special_tokens=False) == whole
