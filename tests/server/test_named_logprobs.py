"""Log-probabilities of the whole vocabulary (-1) and of named tokens, in every route that has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.core.outputs import Logprob
from beheld.server import chat, completions, limits
from beheld.server.schema import ChatRequest, CompletionRequest
from tests.server.running import ENGINE, Running

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
RESPONSES = "/v1/responses"
ASKED: dict[str, Any] = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": -1}
NAMED = {"logprob_token_ids": list(range(100))}
IDS = [11, 12, 13, 14]
TEXT: dict[str, Any] = {"prompt": IDS, "max_tokens": 2, "temperature": 0, "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """A server of a text model that allows as many candidates as there are tokens, and little memory for them."""
    engine = ENGINE | {"max_logprobs": -1, "max_model_len": 512}
    made = Running("qwen2", engine, max_reading_bytes=2 << 20, max_body_bytes=1 << 20)
    yield made
    made.close()


def streamed(served: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream."""
    lines = served.post(path, body | {"stream": True}).text.splitlines()
    return [choice for line in lines if line.startswith("data: {") for choice in json.loads(line[6:])["choices"]]


def test_named_tokens_of_a_completion(served: Running) -> None:
    body = TEXT | {"logprobs": 1, "logprob_token_ids": [5, 3]}
    (choice,) = served.post(COMPLETIONS, body).json()["choices"]
    (whole,) = served.post(COMPLETIONS, TEXT | {"logprobs": -1}).json()["choices"]
    lists, every = choice["logprobs"], whole["logprobs"]
    assert lists["token_logprobs"] == pytest.approx(every["token_logprobs"])
    for own, named, known in zip(lists["tokens"], lists["top_logprobs"], every["top_logprobs"], strict=True):
        assert list(named) == [own, "token_id:5", "token_id:3"]
        assert named == pytest.approx({name: known[name] for name in named})
        assert len(known) == served.llm.info.vocab_size
    pieces = streamed(served, COMPLETIONS, body)
    assert [each for one in pieces if one["logprobs"] for each in one["logprobs"]["top_logprobs"]] == [
        pytest.approx(one) for one in lists["top_logprobs"]
    ]


def test_named_tokens_of_a_long_answer(served: Running) -> None:
    """Answers that are read at their end send many tokens at a time, without log-probabilities."""
    (choice,) = served.post(COMPLETIONS, TEXT | {"max_tokens": 20, "logprobs": 1, "logprob_token_ids": [5]}).json()[
        "choices"
    ]
    assert [len(named) for named in choice["logprobs"]["top_logprobs"]] == [2] * 20


def test_named_tokens_of_a_chat(served: Running) -> None:
    body = HI | {"logprobs": True, "logprob_token_ids": [5, 3, 5], "return_tokens_as_token_ids": True}
    (choice,) = served.post(CHAT, body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [[one["token"] for one in entry["top_logprobs"]] for entry in content] == [
        [entry["token"], "token_id:5", "token_id:3"] for entry in content
    ]
    every = HI | {"logprobs": True, "top_logprobs": -1, "return_tokens_as_token_ids": True}
    (whole,) = served.post(CHAT, every).json()["choices"]
    for entry, known in zip(content, whole["logprobs"]["content"], strict=True):
        values = {one["token"]: one["logprob"] for one in known["top_logprobs"]}
        assert len(known["top_logprobs"]) == served.llm.info.vocab_size
        assert {one["token"]: one["logprob"] for one in entry["top_logprobs"]} == pytest.approx(
            {one["token"]: values[one["token"]] for one in entry["top_logprobs"]}
        )
    pieces = [one for choice in streamed(served, CHAT, body) if choice.get("logprobs") for one in [choice["logprobs"]]]
    assert [one["token"] for piece in pieces for one in piece["content"]] == [one["token"] for one in content]


def test_ids_alone_name_tokens_where_the_parameters_are_the_engines(served: Running) -> None:
    params = {"max_tokens": 2, "temperature": 0.0, "logprob_token_ids": [5, 3]}
    (choice,) = served.post(GENERATE, {"token_ids": IDS, "sampling_params": params}).json()["choices"]
    for entry in choice["logprobs"]["content"]:
        assert {"token_id:5", "token_id:3"} <= {one["token"] for one in entry["top_logprobs"]}


def test_all_candidates_of_a_prompt(served: Running) -> None:
    (choice,) = served.post(COMPLETIONS, TEXT | {"prompt_logprobs": -1}).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert {len(one) for one in others} == {served.llm.info.vocab_size}
    # A chat's prompt may be as long as the context, unless it is cut.
    found = served.post(CHAT, HI | {"prompt_logprobs": -1, "truncate_prompt_tokens": 8}).json()
    assert {len(one) for one in found["prompt_logprobs"][1:]} == {served.llm.info.vocab_size}


def test_all_candidates_of_a_response(served: Running) -> None:
    found = served.post(RESPONSES, ASKED | {"max_output_tokens": 2, "temperature": 0}).json()
    (chat,) = served.post(CHAT, HI | {"logprobs": True, "top_logprobs": -1}).json()["choices"]
    (part,) = found["output"][0]["content"]
    for entry, known in zip(part["logprobs"], chat["logprobs"]["content"], strict=True):
        assert entry["token"] == known["token"]
        assert len(entry["top_logprobs"]) == served.llm.info.vocab_size


def test_an_event_that_shows_a_prompt_has_few_tokens_if_each_has_many_candidates(served: Running) -> None:
    pieces = streamed(served, COMPLETIONS, TEXT | {"prompt": IDS * 8, "echo": True, "max_tokens": 1, "logprobs": -1})
    shown = [len(one["logprobs"]["tokens"]) for one in pieces if one["logprobs"]]
    assert sum(shown) == 33
    assert max(shown) * served.llm.info.vocab_size <= 64 * 20


def test_what_does_not_go_together(served: Running) -> None:
    beams = {"use_beam_search": True, "logprobs": 1, "logprob_token_ids": [5]}
    for path, body, param in (
        (COMPLETIONS, TEXT | {"logprob_token_ids": [5]}, "logprob_token_ids"),
        (CHAT, HI | {"logprob_token_ids": [5]}, "logprob_token_ids"),
        (COMPLETIONS, TEXT | {"logprob_token_ids": [5], "logprobs": 1, "echo": True, "max_tokens": 0}, None),
        (COMPLETIONS, TEXT | beams, "use_beam_search"),
        (COMPLETIONS, TEXT | {"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids"),
        (COMPLETIONS, TEXT | {"logprob_token_ids": list(range(129)), "logprobs": 1}, "logprob_token_ids"),
        (COMPLETIONS, TEXT | {"logprobs": -2}, "logprobs"),
        (COMPLETIONS, TEXT | {"prompt_logprobs": -2}, "prompt_logprobs"),
    ):
        refused = served.post(path, body)
        assert refused.status_code == 400, (path, body, refused.text)
        assert refused.json()["error"]["param"] == (param or "logprob_token_ids")


def test_they_are_bounded(served: Running) -> None:
    """What the answers and the prompt may take is known before the engine computes anything."""
    for path, body, param in (
        (COMPLETIONS, TEXT | {"max_tokens": 400, "logprobs": -1}, "logprobs"),
        (COMPLETIONS, TEXT | {"n": 4, "max_tokens": 100, "logprobs": -1}, "logprobs"),
        (CHAT, HI | {"max_tokens": 400, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, HI | {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, TEXT | {"max_tokens": 400, "logprobs": 1, **NAMED}, "logprob_token_ids"),
        (CHAT, HI | {"max_tokens": 400, "logprobs": True, **NAMED}, "logprob_token_ids"),
        (GENERATE, {"token_ids": IDS, "sampling_params": {"max_tokens": 400, **NAMED}}, "logprob_token_ids"),
        (RESPONSES, ASKED | {"max_output_tokens": 400}, "top_logprobs"),
        (RESPONSES, ASKED | {"max_output_tokens": 400, "stream": True}, "top_logprobs"),
    ):
        refused = served.post(path, body)
        assert refused.status_code == 400, (path, body, refused.text[:300])
        error = refused.json()["error"]
        assert (error["param"], f"The log-probabilities that {param} asks for take up to" in error["message"]) == (
            param,
            True,
        )
    assert served.post(COMPLETIONS, TEXT | {"max_tokens": 400, "logprobs": 5}).status_code == 200
    served.idle()
    assert served.admission.held_bytes == 0


def test_usual_candidates_count_where_there_are_many() -> None:
    """Few bytes of usual candidates are free in a request, not any number of them."""
    asked = TEXT | {"logprobs": 5, "max_tokens": 2000}
    for more, num_answers in (({}, 1), ({"n": 60}, 60)):
        body = CompletionRequest.model_validate(asked | more)
        expected = max(0, 5 * limits.CANDIDATE_BYTES * 2000 * num_answers - limits.FREE_COLUMN_BYTES)
        assert completions.answer_columns_bytes(body, 1, 4096, None) == expected
        # Each of several prompts does not have its own.
        body = body.model_copy(update={"n": 1})
        assert completions.answer_columns_bytes(body, num_answers, 4096, None) == expected
    assert expected > 0
    talk = ChatRequest.model_validate(HI | {"n": 60, "max_tokens": 2000, "logprobs": True, "top_logprobs": 5})
    assert chat.columns_bytes(talk, 4096) == expected


OPEN = {name: value for name, value in HI.items() if name != "max_tokens"} | {"logprobs": True, "top_logprobs": 20}


def test_usual_candidates_of_an_open_answer_count_as_they_come(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few answers are as long as the model allows: 20 candidates were refused where it allows 128 Ki tokens."""
    long = ChatRequest.model_validate(OPEN)
    assert chat.columns_bytes(long, 1 << 17) == 0
    expected = 20 * limits.CANDIDATE_BYTES * 60_000 - limits.FREE_COLUMN_BYTES
    assert chat.columns_bytes(long, 1 << 17, come=60_000) == expected > 0
    monkeypatch.setattr(limits, "FREE_COLUMN_BYTES", 0)
    for path, body, bound in (
        (CHAT, OPEN, "max_tokens"),
        (RESPONSES, ASKED | {"top_logprobs": 20}, "max_output_tokens"),
    ):
        # The model's length, which the answer may have, would be too much.
        refused = served.post(path, body | {bound: 500})
        assert refused.status_code == 400
        short = served.post(path, body | {"structured_outputs": {"choice": ["yes"]}})
        assert short.status_code == 200, short.text
        # One that is too long is refused when it has come.
        found = served.post(path, body | {"ignore_eos": True})
        assert (found.status_code, found.headers.get("retry-after")) == (503, "1"), found.text[:300]
    served.idle()
    assert served.admission.held_bytes == 0


def test_room_of_an_open_answer_of_ids_is_taken_as_it_comes(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for the longest answer that there may be, also where the model soon ends it."""
    monkeypatch.setattr(limits, "FREE_COLUMN_BYTES", 0)
    params = {"logprobs": 20, "temperature": 0}
    for more in ({}, {"stream": True}):
        short = {"token_ids": IDS, "sampling_params": {**params, "structured_outputs": {"choice": ["yes"]}}, **more}
        assert served.post(GENERATE, short).status_code == 200
    stated = {"token_ids": IDS, "sampling_params": {**params, "max_tokens": 500}}
    assert served.post(GENERATE, stated).status_code == 400
    # One that is too long is refused when it has come.
    long = served.post(GENERATE, {"token_ids": IDS, "sampling_params": {**params, "ignore_eos": True}})
    assert (long.status_code, long.headers.get("retry-after")) == (503, "1"), long.text[:300]
    served.idle()
    assert served.admission.held_bytes == 0


def test_candidates_with_one_text_are_all_shown() -> None:
    found = {7: Logprob(-2.0, 2, "�"), 3: Logprob(-0.5, 1, "�"), 9: Logprob(-3.0, 3, "x")}
    entry = completions._entries(7, "�", -2.0, found, 0, as_ids=False)
    assert entry["top_logprobs"] == {"�": -2.0, "token_id:3": -0.5, "x": -3.0}
