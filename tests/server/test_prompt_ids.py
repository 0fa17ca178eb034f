"""`prompt_logprob_token_ids` of /inference/v1/generate: tokens that are named at positions of the prompt."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from beheld.server import limits
from tests.server.running import ENGINE, Running

GENERATE = "/inference/v1/generate"
IDS = [11, 12, 13, 14, 15]
NAME = "prompt_logprob_token_ids"


@pytest.fixture(scope="module", params=["thread", "process"])
def served(request: pytest.FixtureRequest) -> Iterator[Running]:
    made = Running("qwen2", ENGINE | {"max_logprobs": 8, "max_model_len": 64, "engine": request.param})
    yield made
    made.close()


def asked(params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"token_ids": IDS, "sampling_params": {"max_tokens": 1, "temperature": 0, **params}} | more


def scores_of(body: dict[str, Any]) -> np.ndarray:
    found: np.ndarray = np.load(io.BytesIO(base64.b64decode(body["prompt_token_id_logprobs"])))
    return found


def test_they_are_those_of_the_whole_report(served: Running) -> None:
    rows = [[13], [14, 30, 7], [15, 2]]
    body = served.post(GENERATE, asked({"prompt_logprobs": 3, NAME: rows, "prompt_logprob_start": 1})).json()
    scores, known = scores_of(body), body["prompt_logprobs"]
    assert (scores.shape, scores.dtype) == ((3, 3), np.float32)
    for place, row in enumerate(rows):
        # The prompt's own token comes first in each of these rows, and in the report.
        assert scores[place, 0] == pytest.approx(known[place + 2][str(row[0])]["logprob"], abs=1e-5)
        assert np.isfinite(scores[place, : len(row)]).all()
        assert np.isneginf(scores[place, len(row) :]).all()
    # Without the report the same, from the first position on.
    alone = served.post(GENERATE, asked({NAME: [[12], *rows]})).json()
    assert "prompt_logprobs" not in alone
    assert scores_of(alone)[1:] == pytest.approx(scores)


def test_several_answers_have_them_once(served: Running) -> None:
    table = {NAME: [[12], [13], [14], [15]], "prompt_logprobs": 0}
    one, several = (served.post(GENERATE, asked(table | {"n": n})).json() for n in (1, 3))
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert scores_of(several) == pytest.approx(scores_of(one))
    assert several["prompt_logprobs"] == one["prompt_logprobs"]


def test_without_them_there_is_no_field(served: Running) -> None:
    assert "prompt_token_id_logprobs" not in served.post(GENERATE, asked({"prompt_logprobs": 0})).json()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({NAME: [[1], [2]]}, "has 2 rows, but 5 tokens have 4 scored rows"),
        ({NAME: [[1]] * 4, "prompt_logprob_start": 1}, "5 tokens have 3 scored rows from"),
        ({NAME: [[1] * 9] * 4}, "exceeds max_logprobs=8"),
        ({NAME: [[10**6]] * 4}, "out-of-vocab"),
        ({NAME: [[], [], [], []]}, "non-empty"),
        ({NAME: []}, "non-empty"),
        ({NAME: [[-2]] * 4}, "0.0 must be at least -1"),
        ({NAME: [[1.5]] * 4}, "0.0 must be a whole number"),
        ({NAME: [[True]] * 4}, "0.0 must be a whole number"),
        ({NAME: [1, 2]}, "0 must be a list"),
        ({NAME: [[0] * 5000, *[[]] * 1000]}, "cells"),
        ({"prompt_logprob_start": 1}, "requires sampling_params.prompt_logprob_token_ids"),
        ({NAME: [[1]] * 4, "prompt_logprob_start": -1}, "at least 0"),
    ],
)
def test_a_wrong_table_is_refused_by_name(served: Running, params: dict[str, Any], words: str) -> None:
    assert limits.MAX_TABLE_CELLS < 5000 * 1001
    found = served.post(GENERATE, asked(params))
    error = found.json()["error"]
    assert found.status_code == 400, error
    assert words in error["message"]
    start = params.get("prompt_logprob_start")
    assert error["param"].startswith(
        "sampling_params.prompt_logprob_start" if start == -1 or NAME not in params else f"sampling_params.{NAME}"
    )


def test_a_stream_has_none(served: Running) -> None:
    found = served.post(GENERATE, asked({NAME: [[1]] * 4}, stream=True))
    assert (found.status_code, found.json()["error"]["param"]) == (400, f"sampling_params.{NAME}")


def test_openai_routes_have_no_such_field(served: Running) -> None:
    assert served.post("/v1/completions", {"prompt": IDS, NAME: [[1]] * 4}).status_code == 400
