"""A server with --logprobs-mode: answers and prompts are reported in it, scores and decisions are what they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import kept
from tests.server.running import ENGINE, Running
from tests.server.test_transcriptions import FEW, LONG

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
PROMPT = [11, 12, 13, 14]
DRAWN: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "seed": 3,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def processed() -> Iterator[Running]:
    """As `running`, but what it reports are the logits that tokens are sampled from."""
    with kept(Running(engine=ENGINE | {"logprobs_mode": "processed_logits"})) as found:
        yield found


def test_answers_have_logits_and_what_filters_leave_out_has_the_least_number(
    running: Running, processed: Running
) -> None:
    asked = DRAWN | {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "logprobs": True}
    first, last = (
        each.post(CHAT, asked | {"top_logprobs": 4}).json()["choices"][0]["logprobs"]["content"]
        for each in (running, processed)
    )
    assert [entry["token"] for entry in first] == [entry["token"] for entry in last]
    for own, other in zip(first, last, strict=True):
        assert own["logprob"] < 0
        values = [entry["logprob"] for entry in other["top_logprobs"]]
        assert values[2:] == [-9999.0, -9999.0]
        raw = [entry["logprob"] for entry in own["top_logprobs"]]
        # Temperature doubles the distance of the two that are left.
        assert values[0] - values[1] == pytest.approx(2 * (raw[0] - raw[1]), abs=1e-3)
    complete = {"prompt": PROMPT, "max_tokens": 2, "logprobs": 3} | DRAWN
    whole = processed.post(COMPLETE, complete).json()["choices"][0]["logprobs"]
    assert all(min(likely.values()) == -9999.0 for likely in whole["top_logprobs"])


def test_an_echoed_prompt_has_logits(running: Running, processed: Running) -> None:
    """As in vLLM: of the distances between tokens nothing changes."""
    asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
    first, last = (each.post(COMPLETE, asked).json()["choices"][0]["logprobs"] for each in (running, processed))
    assert first["tokens"] == last["tokens"]
    assert all(value < 0 for value in first["token_logprobs"][1:])
    assert first["token_logprobs"][1:] != last["token_logprobs"][1:]
    for own, other in zip(first["top_logprobs"][1:], last["top_logprobs"][1:], strict=True):
        assert list(own) == list(other)
        assert len({round(other[name] - own[name], 3) for name in own}) == 1


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generative_scoring", {"query": [11, 12], "items": [[14], [15, 16]], "label_token_ids": [20, 30]}),
        (
            "/v1/systemone",
            {
                "state": "It rains.",
                "questions": {"wet": {"type": "noul", "instructions": "Is it wet?", "criteria": {"true": "it drips"}}},
            },
        ),
        (COMPLETE, {"prompt": PROMPT, "max_tokens": 3, "n": 2, "use_beam_search": True, "logprobs": 2}),
    ],
)
def test_scores_decisions_and_searches_read_the_models_own(
    running: Running, processed: Running, route: str, body: dict[str, Any]
) -> None:
    found = []
    for each in (running, processed):
        answer = each.post(route, body)
        assert answer.status_code == 200, answer.text
        found.append({name: value for name, value in answer.json().items() if name not in ("id", "created")})
    assert any(isinstance(value, dict | list) for value in found[0].values())
    assert _flat(found[0]) == pytest.approx(_flat(found[1]), abs=1e-5)


def _flat(value: Any) -> list[float]:
    """All numbers of an answer, in order."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in _flat(each)]
    if isinstance(value, list):
        return [number for each in value for number in _flat(each)]
    return [float(value)] if isinstance(value, int | float) else []


def test_a_transcripts_segments_are_judged_by_the_models_own() -> None:
    """The thresholds of silence and of doubt hold for log-probabilities; and these are what segments tell."""
    found = []
    for mode in ("raw_logprobs", "processed_logits"):
        engine = ENGINE | {"max_model_len": 96, "limit_mm_per_prompt": {}, "num_gpu_blocks_override": 200}
        with kept(Running("whisper", engine | {"logprobs_mode": mode})) as server:
            form = {"model": "tiny", "language": "en", "response_format": "verbose_json"}
            form |= {name: str(value) for name, value in FEW.items()}
            answer = server.request("POST", "/v1/audio/transcriptions", data=form, files={"file": ("a.wav", LONG)})
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["segments"])
    assert found[0]
    assert all(one["avg_logprob"] < 0 and 0 <= one["no_speech_prob"] <= 1 for one in found[1])
    assert _flat(found[0]) == pytest.approx(_flat(found[1]), abs=1e-4)
