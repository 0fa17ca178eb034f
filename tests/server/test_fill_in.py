"""A suffix is written into the prompt with the model's marks, or refused where it has none."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from beheld.server.errors import HttpError
from beheld.server.fill_in import FORMS, filled
from beheld.server.schema import CompletionRequest
from tests import tiny
from tests.server.running import Running

MOST = 1000


def tokenizer_with(marks: tuple[str, ...]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny.checkpoint("llama"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    return tokenizer


def body(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "def f({}):", "suffix": "  return {x}"} | fields)


@pytest.mark.parametrize("marks", FORMS)
def test_a_suffix_is_written_with_the_models_marks(marks: tuple[str, ...]) -> None:
    tokenizer = tokenizer_with(marks)
    made = filled(body(), tokenizer, MOST)
    assert made.suffix is None
    ids = tokenizer(made.prompt, add_special_tokens=False)["input_ids"]
    found = [tokenizer.convert_ids_to_tokens(one) for one in ids if one in tokenizer.added_tokens_decoder]
    assert found == list(marks)
    between = made.prompt
    for mark in marks:
        between = between.replace(mark, "|")
    expected = "||def f({}):" if marks[0] == "[SUFFIX]" else "|def f({}):|  return {x}|"
    assert between == (expected.replace("||", "|  return {x}|"))
    several = filled(body(prompt=["a", "b"]), tokenizer, MOST).prompt
    assert [text.count(marks[0]) for text in several] == [1, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "suffix"), ({"prompt": [1, 2]}, "prompt"), ({"prompt": "", "prompt_embeds": "x"}, "suffix")],
)
def test_what_cannot_be_combined(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as found:
        filled(body(**fields), tokenizer_with(next(iter(FORMS))), MOST)
    assert (found.value.status, found.value.param) == (400, param)


def test_a_suffix_in_many_prompts_is_bounded() -> None:
    """A body of 64 MiB would make prompts of 4 GiB."""
    tokenizer = tokenizer_with(next(iter(FORMS)))
    assert len(filled(body(prompt=["a"] * 10, suffix="b" * 100), tokenizer, MOST).prompt) == 10
    with pytest.raises(HttpError, match="in each of 11 prompts") as found:
        filled(body(prompt=["a"] * 11, suffix="b" * 100), tokenizer, MOST)
    assert (found.value.status, found.value.param) == (400, "suffix")


def test_a_model_without_marks_refuses_it(running: Running) -> None:
    answer = running.post("/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "suffix"
    assert "no tokens that mark" in answer.json()["error"]["message"]
    for nothing in ("", None):
        answer = running.post("/v1/completions", {"prompt": "a", "suffix": nothing, "max_tokens": 1})
        assert answer.status_code == 200
