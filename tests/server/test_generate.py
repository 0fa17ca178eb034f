"""/inference/v1/generate: token ids in, the ids of the same completion out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from beheld.core.params import SamplingParams
from tests.server.running import ENGINE, Running

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
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


def test_texts_where_they_are_asked_for(running: Running) -> None:
    asked = {"token_ids": IDS, "sampling_params": PARAMS | {"detokenize": True}, "output_mode": "text"}
    found = running.post(GENERATE, asked).json()
    (choice,), expected = found["choices"], completed(running)["choices"][0]
    assert (found["output_mode"], choice["text"], choice["token_ids"]) == (
        "text",
        expected["text"],
        expected["token_ids"],
    )
    lines = running.post(GENERATE, asked | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert {chunk["output_mode"] for chunk in chunks} == {"text"}
    assert "text" not in running.post(GENERATE, asked | {"output_mode": "tokens"}).json()["choices"][0]


def test_without_a_bound_an_answer_takes_the_room_that_there_is(running: Running) -> None:
    """It had 16 tokens."""
    prompt = IDS * 500
    asked = {"token_ids": prompt, "sampling_params": {"ignore_eos": True}}
    found = running.post(GENERATE, asked).json()
    assert len(found["choices"][0]["token_ids"]) == ENGINE["max_model_len"] - len(prompt)
    refused = running.post(GENERATE, asked | {"sampling_params": {"min_tokens": 100}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling_params.min_tokens")


def test_the_room_is_that_behind_a_prompt_that_is_cut(running: Running) -> None:
    """It was counted behind the whole one, which leaves none here."""
    most = ENGINE["max_model_len"]
    params = {"ignore_eos": True, "truncate_prompt_tokens": most - 30}
    found = running.post(GENERATE, {"token_ids": IDS * (most // len(IDS) + 1), "sampling_params": params}).json()
    assert len(found["choices"][0]["token_ids"]) == 30


def test_a_length_that_the_operator_states_holds(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.llm, "get_default_sampling_params", lambda: SamplingParams(max_tokens=7))
    found = running.post(GENERATE, {"token_ids": IDS, "sampling_params": {"ignore_eos": True}}).json()
    assert len(found["choices"][0]["token_ids"]) == 7


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
        ({"output_mode": "derender"}, "output_mode"),
        ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "sampling_params.detokenize"),
        ({"model": "other"}, "model"),
    ],
)
def test_refusals_name_the_field(running: Running, body: dict[str, Any], param: str) -> None:
    answer = running.post(GENERATE, {"token_ids": IDS, "sampling_params": {"max_tokens": 1}} | body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_an_answer_is_ended_by_its_id_and_says_so(running: Running, mode: str) -> None:
    """A client that ends its request by closing the connection does not see how far the answer came."""
    asked = {"token_ids": IDS, "sampling_params": {"max_tokens": 1500, "ignore_eos": True, "n": 2}, "stream": True}
    other = asked | {"sampling_params": {"max_tokens": 40, "ignore_eos": True}}
    with (
        httpx.stream("POST", running.url + GENERATE, json=asked | {"output_mode": mode}, trust_env=False) as stream,
        httpx.stream("POST", running.url + GENERATE, json=other, trust_env=False) as another,
    ):
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        chunks = [next(lines)]
        name = chunks[0]["request_id"]
        ended = running.post(ABORT, {"request_ids": [name, "nobody", name[:-1]]})
        assert (ended.status_code, ended.content) == (200, b"")
        chunks += lines
        rest = [json.loads(line[6:]) for line in another.iter_lines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["abort", "abort"]
    assert sum(len(choice["token_ids"]) for choice in choices) < 2000
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 1500}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1500}),
    ],
)
def test_so_are_answers_of_other_routes(running: Running, path: str, body: dict[str, Any]) -> None:
    more = {"ignore_eos": True, "stream": True}
    with httpx.stream("POST", running.url + path, json=body | more, trust_env=False) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        seen = set[int]()
        reasons = list[str]()
        for chunk in lines:
            before = len(seen)
            seen |= {choice["index"] for choice in chunk["choices"]}
            if len(seen) == len(body.get("prompt", "x")) > before:
                running.post(ABORT, {"request_ids": [chunk["id"]]})
            reasons += [choice["finish_reason"] for choice in chunk["choices"] if choice["finish_reason"]]
    assert reasons == ["abort"] * len(body.get("prompt", "x"))


def test_what_names_no_answer_is_refused(running: Running) -> None:
    for body, param in (({}, "request_ids"), ({"request_ids": "x"}, "request_ids"), ({"request_ids": []}, None)):
        answer = running.post(ABORT, body)
        if param is None:
            assert answer.status_code == 200
        else:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    # vLLM's other route of that name asks for no key.
    assert running.post("/abort_requests", {"request_ids": ["x"]}).status_code == 404
