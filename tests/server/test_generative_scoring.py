"""/generative_scoring: the probability of a label after a query and each item, as the same completions say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.server.running import Running

ROUTE = "/generative_scoring"
QUERY, ITEMS, LABELS = [11, 12, 13], [[14], [15, 16]], [20, 30, 40]


def logprobs(running: Running, prompt: list[int]) -> list[float]:
    """Of the labels, as a completion tells them."""
    asked = {"prompt": prompt, "max_tokens": 1, "logprobs": 3, "logprob_token_ids": LABELS, "ignore_eos": True}
    found = running.post("/v1/completions", asked | {"return_tokens_as_token_ids": True}).json()
    (likely,) = found["choices"][0]["logprobs"]["top_logprobs"]
    return [likely[f"token_id:{label}"] for label in LABELS]


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_the_score_is_the_first_labels_probability(running: Running, softmax: bool, first: bool) -> None:
    asked: dict[str, Any] = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, "item_first": first}
    found = running.post(ROUTE, asked | {"apply_softmax": softmax}).json()
    assert (found["object"], found["id"][:19]) == ("list", "generative-scoring-")
    assert found["usage"]["prompt_tokens"] == 4 + 5
    assert found["usage"]["completion_tokens"] == 2
    for entry, item in zip(found["data"], ITEMS, strict=True):
        likely = logprobs(running, [*item, *QUERY] if first else [*QUERY, *item])
        total = sum(map(math.exp, likely)) if softmax else 1.0
        assert entry["score"] == pytest.approx(math.exp(likely[0]) / total, rel=1e-4)
    assert [entry["index"] for entry in found["data"]] == [0, 1]


def test_texts_are_joined_as_tokens(running: Running) -> None:
    def ids(text: str, *, special: bool) -> list[int]:
        found: list[int] = running.post("/tokenize", {"prompt": text, "add_special_tokens": special}).json()["tokens"]
        return found

    asked = {"label_token_ids": LABELS}
    text = running.post(ROUTE, asked | {"query": "Is it red? ", "items": ["A stone."]}).json()
    plain = {"query": ids("Is it red? ", special=True), "items": [ids("A stone.", special=False)]}
    assert running.post(ROUTE, asked | plain).json()["data"] == text["data"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": []}, "items"),
        ({"items": [[14]] * 9}, "items"),
        ({"items": [[10**6]]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [10**12]}, "label_token_ids.0"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"labels": ["yes"]}, "labels"),
        ({"model": "other"}, "model"),
        # Joined, they would be as many times as large as there are items.
        ({"query": [14] * 100_000, "items": [[14]] * 8}, "query"),
        ({"items": [[14] * 2048]}, "items"),
    ],
)
def test_refusals_name_the_field_in_vllms_form(running: Running, body: dict[str, Any], param: str) -> None:
    answer = running.post(ROUTE, {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) in ((400, "BadRequestError"), (404, "NotFoundError"))
    assert error["param"] == param
