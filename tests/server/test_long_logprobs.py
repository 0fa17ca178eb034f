"""Log-probabilities of many answers (case 142): they are made and written in pieces, and nobody waits for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from beheld.server.response_store import TokenEntries, size_of
from tests.server.running import Running, received, request_bytes, watched
from tests.server.slowness import best, slowness

pytestmark = pytest.mark.case(142)

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_SAID = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
_MANY: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**_MANY, **_SAID, "n": 8, "top_logprobs": 20, "max_tokens": 120}),
    "named": (CHAT, {**_MANY, **_SAID, "n": 4, "logprob_token_ids": list(range(100)), "max_tokens": 120}),
    "completion": (COMPLETIONS, {**_MANY, "prompt": "a", "n": 8, "logprobs": 20, "max_tokens": 120}),
    "response": (
        RESPONSES,
        {
            **_MANY,
            "input": "a",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 20,
            "max_output_tokens": 200,
        },
    ),
}


def _answer(running: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = running.post(path, body).json()
    return found


@pytest.mark.parametrize("what", ASKED)
def test_many_log_probabilities_keep_nobody_waiting(running: Running, what: str) -> None:
    """Two requests held the loop for seconds."""
    path, body = ASKED[what]
    running.post(path, {**body, "n": 1} if "n" in body else body)

    def late_s() -> float:
        with watched(running) as late, running.connect(60.0) as link:
            link.sendall(request_bytes(path, body))
            answer = received(link)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
        return max(late)

    bound = 0.03 * slowness()
    assert best(late_s, bound) < bound
    running.idle()


@pytest.mark.parametrize("what", ASKED)
def test_long_ones_are_those_of_short_answers(running: Running, what: str) -> None:
    """What is written in pieces says the same as what is written at once."""
    path, body = ASKED[what]
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    one = {name: value for name, value in body.items() if name != "n"}
    short, long = _answer(running, path, {**one, length: 1}), _answer(running, path, one)
    if path == COMPLETIONS:
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            few, many = (each["choices"][0]["logprobs"][name] for each in (short, long))
            assert few[0] == pytest.approx(many[0], abs=1e-4)
            assert len(many) == body[length]
    elif path == CHAT:
        few, many = (each["choices"][0]["logprobs"]["content"] for each in (short, long))
        assert few[0]["token"] == many[0]["token"]
        assert [top["token"] for top in few[0]["top_logprobs"]] == [top["token"] for top in many[0]["top_logprobs"]]
        assert len(many) == body[length]
    else:
        (few,), (many,) = (each["output"][-1]["content"] for each in (short, long))
        assert few["logprobs"][0]["token"] == many["logprobs"][0]["token"]
        kept = running.get(f"{RESPONSES}/{long['id']}").json()
        assert kept["output"] == long["output"]
    running.idle()


def test_a_stream_of_a_response_has_them_in_its_last_events(running: Running) -> None:
    body = {**ASKED["response"][1], "stream": True}
    lines = running.post(RESPONSES, body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    by_type = {event["type"]: event for event in events}
    whole = by_type["response.incomplete"]["response"]["output"][-1]["content"][0]["logprobs"]
    assert len(whole) > 100
    assert by_type["response.output_text.done"]["logprobs"] == whole
    assert by_type["response.output_item.done"]["item"]["content"][0]["logprobs"] == whole


def test_they_are_counted_by_the_first() -> None:
    entry = {"token": "a", "logprob": -1.0}
    assert size_of(TokenEntries([entry] * 10)) == size_of([entry] * 10)
    assert size_of(TokenEntries()) == size_of([])
