"""The logits processor that bars repeated runs: by definition, and inside the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beheld import LLM, SamplingParams
from beheld.compat.ngram import NGramPerReqLogitsProcessor, repeating
from beheld.core.errors import ParamsError
from tests import tiny


# The first draw of a process may take seconds on a machine that does other things besides.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 3), max_size=14), st.integers(1, 4), st.integers(1, 10))
def test_a_token_is_barred_if_it_would_complete_a_run_of_the_window(ids: list[int], size: int, window: int) -> None:
    recent = ids[-window:]
    runs = {tuple(recent[i : i + size]) for i in range(len(recent) - size + 1)}
    head = tuple(ids[len(ids) - size + 1 :]) if len(ids) >= size else None
    expected = {token for token in range(4) if head is not None and (*head, token) in runs}
    assert repeating(ids, size, window) == expected


def processor(**extra: Any) -> Any:
    return NGramPerReqLogitsProcessor().new_req_logits_processor(SamplingParams(extra_args=extra or None))


def test_excepted_tokens_are_never_barred() -> None:
    ids = [1, 2, 3, 1, 2]
    barred = processor(ngram_size=3, window_size=9)(ids, torch.zeros(5))
    assert torch.isinf(barred).tolist() == [False, False, False, True, False]
    assert not torch.isinf(processor(ngram_size=3, whitelist_token_ids={3})(ids, torch.zeros(5))).any()
    assert processor() is None


@pytest.mark.parametrize(
    "extra",
    [
        {"ngram_size": 0},
        {"ngram_size": "3"},
        {"ngram_size": 3, "window_size": 0},
        {"ngram_size": 3, "whitelist_token_ids": "12"},
        {"ngram_size": 3, "whitelist_token_ids": [-1]},
        {"ngram_size": 3, "ngram_sise": 3},
        {"window_size": 3},
    ],
)
def test_wrong_arguments_are_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ParamsError):
        processor(**extra)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(tiny.checkpoint("llama")),
        dtype="float32",
        max_model_len=256,
        logits_processors=[NGramPerReqLogitsProcessor],
    ) as made:
        yield made


def test_in_the_engine_no_run_comes_twice_and_the_neighbour_is_left_alone(llm: LLM) -> None:
    def params(**extra: Any) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, extra_args=extra or None)

    alone = llm.generate("Hello", params(), use_tqdm=False)[0].outputs[0].token_ids
    told = params(ngram_size=1, window_size=200, whitelist_token_ids=set())
    both = llm.generate(["Hello", "Hello"], [params(), told], use_tqdm=False)
    free, barred = (list(output.outputs[0].token_ids) for output in both)
    assert free == list(alone)
    assert len(set(barred)) == 120
    # Left alone the tiny model repeats itself, or this would prove nothing.
    assert len(set(free)) < 120
