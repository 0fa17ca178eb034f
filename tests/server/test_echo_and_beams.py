"""What evaluations ask for: the prompt's log-probabilities before the answer, and beam search."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from beheld import LLM, SamplingParams
from beheld.core.beams import BeamSearchParams
from beheld.core.structured_outputs import StructuredOutputs
from tests.server.running import ENGINE, Running, data_url
from tests.server.test_refusals import refused

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def offline(running: Running) -> LLM:
    """The same model without a server."""
    return LLM(running.llm.info.path, **ENGINE)


def complete(running: Running, **body: Any) -> list[dict[str, Any]]:
    answer = running.post(COMPLETE, GREEDY | body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


def test_an_echo_has_the_log_probabilities_of_the_prompt(running: Running, offline: LLM) -> None:
    ids = running.post("/tokenize", {"prompt": "a small cat sat"}).json()["tokens"]
    wanted = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    (expected,) = offline.generate({"prompt_token_ids": ids}, wanted, use_tqdm=False)
    (choice,) = complete(running, prompt=ids, echo=True, logprobs=2, max_tokens=2)
    lists = choice["logprobs"]
    assert {len(values) for values in lists.values()} == {len(ids) + 2}
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
    rows = [*(expected.prompt_logprobs or ())[1:], *(expected.outputs[0].logprobs or ())]
    for token, row, value in zip(
        [*ids[1:], *expected.outputs[0].token_ids], rows, lists["token_logprobs"][1:], strict=True
    ):
        assert row is not None
        np.testing.assert_allclose(value, row[token].logprob, atol=1e-4)
    assert "".join(lists["tokens"]) == choice["text"]
    assert lists["text_offset"] == [len("".join(lists["tokens"][:end])) for end in range(len(ids) + 2)]
    assert all(len(candidates) in (2, 3) for candidates in lists["top_logprobs"][1:])


def test_without_an_answer_the_prompt_comes_alone(running: Running) -> None:
    long = complete(running, prompt=["a small cat", "two dogs"], echo=True, logprobs=0, max_tokens=1)
    answer = running.post(
        COMPLETE, {"prompt": ["a small cat", "two dogs"], "echo": True, "logprobs": 0, "max_tokens": 0}
    )
    assert answer.json()["usage"]["completion_tokens"] == 0
    for choice, longer, text in zip(answer.json()["choices"], long, ("a small cat", "two dogs"), strict=True):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        for name, values in choice["logprobs"].items():
            assert values == longer["logprobs"][name][:-1]
    refused(running.post(COMPLETE, {"prompt": "x", "max_tokens": 0}), 400, "max_tokens")


def test_a_streamed_echo_is_the_same(running: Running) -> None:
    body = GREEDY | {"prompt": "a small cat", "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2}
    whole = complete(running, **body)
    events = running.post(COMPLETE, body | {"stream": True}).text.split("\n\n")
    found: dict[int, dict[str, list[Any]]] = {0: {}, 1: {}}
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                found[choice["index"]].setdefault(name, []).extend(values)
    for choice in whole:
        assert found[choice["index"]] == choice["logprobs"]


def test_beams_are_those_of_a_script(running: Running, offline: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5)
    texts = ["a small cat sat", "two dogs"]
    expected = offline.beam_search([{"prompt": text} for text in texts], params)
    ids = [offline.get_tokenizer().encode(text) for text in texts]
    body = {"prompt": texts, "n": 3, "max_tokens": 5, "use_beam_search": True, "length_penalty": 0.5}
    answer = running.post(COMPLETE, body).json()
    tokenizer = offline.get_tokenizer()
    wanted = [
        tokenizer.decode(beam.tokens[len(prompt) :], skip_special_tokens=True)
        for prompt, output in zip(ids, expected, strict=True)
        for beam in output.sequences
    ]
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert len(set(wanted[:3])) == 3
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    with_logprobs = running.post(COMPLETE, body | {"logprobs": 1, "prompt": texts[0]}).json()["choices"]
    np.testing.assert_allclose(
        [sum(choice["logprobs"]["token_logprobs"]) for choice in with_logprobs],
        [beam.cum_logprob for beam in expected[0].sequences],
        atol=1e-3,
    )
    streamed = running.post(COMPLETE, body | {"stream": True}).text
    chunks = [json.loads(event[6:]) for event in streamed.split("\n\n")[:-2]]
    assert [choice["text"] for chunk in chunks for choice in chunk["choices"]] == wanted
    running.idle()


def test_a_search_gives_as_many_candidates_as_were_asked_for(running: Running) -> None:
    body = {"prompt": "a small cat", "max_tokens": 2, "use_beam_search": True, "ignore_eos": True, "logprobs": 5}
    (choice,) = running.post(COMPLETE, body).json()["choices"]
    # Two would be enough for one beam; some of the five have the same text.
    assert all(2 < len(found) <= 5 for found in choice["logprobs"]["top_logprobs"])
    for logprobs in (-1, 99):
        refused(running.post(COMPLETE, body | {"logprobs": logprobs}), 400, "logprobs")
    # 64 answers are allowed, and 20 candidates at each token.
    refused(running.post(COMPLETE, body | {"n": 11}), 400, "n")


def test_beams_over_a_picture(running: Running, offline: LLM) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url()}}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}]
    body = {"messages": messages, "n": 2, "max_tokens": 4, "use_beam_search": True, "ignore_eos": True}
    answer = running.post(CHAT, body).json()
    found = [choice["message"]["content"] for choice in answer["choices"]]
    assert answer["media"][0]["tokens"] > 0
    # The best of one beam is the greedy answer.
    greedy = running.post(CHAT, GREEDY | {"messages": messages, "max_tokens": 4}).json()["choices"][0]["message"]
    one = running.post(CHAT, body | {"n": 1}).json()["choices"][0]["message"]
    assert one["content"] == greedy["content"]
    assert len(found) == len(set(found)) == 2
    running.idle()


def test_a_stream_of_beams_has_their_log_probabilities(running: Running) -> None:
    """More than are made at once; the stream ended with an error."""
    messages = [{"role": "user", "content": "What is it?"}]
    body = {"messages": messages, "n": 4, "max_tokens": 40, "use_beam_search": True, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 5}
    whole = [choice["logprobs"]["content"] for choice in running.post(CHAT, body).json()["choices"]]
    found: list[list[Any]] = [[] for _ in whole]
    events = running.post(CHAT, body | {"stream": True}).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    for event in events[:-2]:
        for choice in json.loads(event[6:])["choices"]:
            found[choice["index"]] += (choice["logprobs"] or {}).get("content") or []
    assert found == whole


WORDS = ["yes", "no", "not so"]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22, 3]}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("more", "form"),
    [
        ({"structured_outputs": {"choice": WORDS}}, {"choice": WORDS}),
        ({"structured_outputs": {"regex": "(a|bc)d{2,4}"}}, {"regex": "(a|bc)d{2,4}"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json": SCHEMA}),
    ],
)
def test_beams_follow_a_grammar(running: Running, offline: LLM, more: dict[str, Any], form: dict[str, Any]) -> None:
    """The sequences that a script finds, also in a stream."""
    params = BeamSearchParams(beam_width=3, max_tokens=40, structured_outputs=StructuredOutputs(**form))
    (expected,) = offline.beam_search([{"prompt": "a small cat sat"}], params)
    num_prompt = len(offline.get_tokenizer().encode("a small cat sat"))
    wanted = [offline.get_tokenizer().decode(beam.tokens[num_prompt:]) for beam in expected.sequences]
    body = {"prompt": "a small cat sat", "n": 3, "max_tokens": 40, "use_beam_search": True, **more}
    assert [choice["text"] for choice in complete(running, **body)] == wanted
    assert all(choice["finish_reason"] == "stop" for choice in complete(running, **body))
    chunks = running.post(COMPLETE, body | {"stream": True}).text.split("\n\n")[:-2]
    assert [choice["text"] for chunk in chunks for choice in json.loads(chunk[6:])["choices"]] == wanted
    running.idle()


def test_beams_of_a_conversation_follow_a_grammar(running: Running) -> None:
    """One that a response_format says, and one of a tool that must be called."""
    asked = {"messages": [{"role": "user", "content": "Is it?"}], "n": 2, "max_tokens": 60, "use_beam_search": True}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    formed = running.post(CHAT, asked | {"response_format": schema}).json()["choices"]
    assert len(formed) == 2
    assert all(json.loads(choice["message"]["content"])["n"] in (1, 22, 3) for choice in formed)
    tool = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
    named = {"type": "function", "function": {"name": "count"}}
    called = running.post(CHAT, asked | {"tools": [tool], "tool_choice": named}).json()["choices"]
    for choice in called:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "count"
        assert json.loads(call["function"]["arguments"])["n"] in (1, 22, 3)


def test_beams_of_allowed_tokens(running: Running) -> None:
    allowed = running.post("/tokenize", {"prompt": "a b c d", "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": "a small cat", "n": 3, "max_tokens": 3, "use_beam_search": True, "return_token_ids": True}
    found = complete(running, **body, allowed_token_ids=allowed)
    assert len({tuple(choice["token_ids"]) for choice in found}) == 3
    assert all(set(choice["token_ids"]) <= set(allowed) for choice in found)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stop": ["x"]}, "use_beam_search"),
        ({"allowed_token_ids": list(range(129))}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "structured_outputs": {"regex": "a"}}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"n": 99}, "n"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_does_not_go_with_beams(running: Running, more: dict[str, Any], param: str) -> None:
    refused(running.post(COMPLETE, {"prompt": "x", "max_tokens": 2, "use_beam_search": True, **more}), 400, param)


# lm-evaluation-harness 0.4.13, as it asked: scores of an answer after a context, and an answer about a picture.
def test_lm_evaluation_harness_reads_the_scores(running: Running, offline: LLM) -> None:
    ids = running.post("/tokenize", {"prompt": "a small cat sat on the mat"}).json()["tokens"]
    begin = len(running.post("/tokenize", {"prompt": "a small cat sat"}).json()["tokens"])
    recorded = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = running.post(COMPLETE, recorded | {"model": "tiny", "prompt": [ids]})
    (choice,) = answer.json()["choices"]
    # It drops the answer's one token, and calls a token greedy whose number is the greatest of its candidates.
    values = choice["logprobs"]["token_logprobs"][begin:-1]
    tops = choice["logprobs"]["top_logprobs"][begin:-1]
    (output,) = offline.generate(
        {"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False
    )
    rows = (output.prompt_logprobs or [])[begin:]
    assert len(values) == len(ids) - begin == len(rows)
    for token, row, value, top in zip(ids[begin:], rows, values, tops, strict=True):
        assert row is not None
        np.testing.assert_allclose(value, row[token].logprob, atol=1e-4)
        assert (value == max(top.values())) == (row[token].rank == 1)


def test_lm_evaluation_harness_sends_pictures(running: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(), "detail": "auto"}}
    content = [part, {"type": "text", "text": "What colour is the square?"}]
    recorded = {
        "messages": [{"role": "user", "content": content}],
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "stop": ["\n"],
        "seed": 1234,
    }
    answer = running.post(CHAT, recorded)
    assert answer.status_code == 200, answer.text
    assert answer.json()["media"][0]["tokens"] > 0
