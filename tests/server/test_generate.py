"""/inference/v1/generate: token ids in, the ids of the same completion out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.running import Running

GENERATE = "/inference/v1/generate"
IDS = [11, 12, 13, 14]
PARAMS: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "logprobs": 1, "detokenize": False}


def completed(running: Running, **more: Any) -> dict[str, Any]:
    asked = {"prompt": IDS, "max_tokens": 5, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    found: dict[str, Any] = running.post("/v1/completions", asked | more).json()
    return found


def test_the_ids_are_those_of_the_completion(running: Running) -> None:
    found = running.post(GENERATE, {"token_ids": IDS, "sampling_params": PARAMS, "return_token_ids": True}).json()
    expected = completed(running)
    (choice,), (own,) = found["choices"], expected["choices"]
    assert choice["token_ids"] == own["token_ids"]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == own["logprobs"]["token_logprobs"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert (choice["finish_reason"], found["prompt_token_ids"]) == ("length", IDS)
    assert found["usage"] == expected["usage"] | {"prompt_tokens_details": found["usage"]["prompt_tokens_details"]}
    assert [one["param"] for one in found["warnings"]] == ["detokenize"]


def test_a_stream_and_several_answers(running: Running) -> None:
    params = PARAMS | {"n": 2, "temperature": 2.0, "top_k": 0, "top_p": 1.0, "seed": 3}
    asked = {"token_ids": IDS, "sampling_params": params}
    whole = running.post(GENERATE, asked).json()
    assert "prompt_token_ids" not in whole
    text = running.post(GENERATE, asked | {"stream": True}).text
    ids: dict[int, list[int]] = {0: [], 1: []}
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                ids[choice["index"]] += choice["token_ids"]
    assert [choice["token_ids"] for choice in whole["choices"]] == [ids[0], ids[1]]
    assert ids[0] != ids[1]


def test_log_probabilities_of_the_prompt(running: Running) -> None:
    params = {"max_tokens": 1, "prompt_logprobs": 0}
    found = running.post(GENERATE, {"token_ids": IDS, "sampling_params": params}).json()
    expected = completed(running, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert found["prompt_logprobs"] == expected
    assert len(expected) == len(IDS)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_q": 1}}, "sampling_params.top_q"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"model": "other"}, "model"),
    ],
)
def test_refusals_name_the_field(running: Running, body: dict[str, Any], param: str) -> None:
    answer = running.post(GENERATE, {"token_ids": IDS, "sampling_params": {"max_tokens": 1}} | body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
