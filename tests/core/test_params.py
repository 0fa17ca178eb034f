"""Sampling parameters and engine options as users write them: numpy's numbers, misspelt names."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

from beheld import EngineArgs, SamplingParams
from beheld.core.beams import BeamSearchParams
from beheld.core.errors import ConfigError, ParamsError


def test_numbers_of_numpy_become_pythons() -> None:
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        top_k=np.int32(7),
        max_tokens=np.uint8(3),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=[np.int16(4), 5],
        logprobs=np.int64(1),
    )
    assert params == SamplingParams(
        n=2, temperature=0.5, top_p=0.25, top_k=7, max_tokens=3, seed=2**64 - 1, stop_token_ids=[4, 5], logprobs=1
    )
    values = (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed, params.logprobs)
    assert {type(value) for value in values} == {int, float}
    assert {type(token) for token in params.stop_token_ids or ()} == {int}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", np.float32("nan")),
        ("temperature", np.True_),
        ("temperature", 10**400),
        ("temperature", "0.5"),
        ("top_k", np.float64(3)),
        ("max_tokens", np.int64(0)),
        ("max_tokens", np.True_),
        ("stop_token_ids", [np.int64(-1)]),
        ("seed", 2**64),
    ],
)
def test_what_is_no_such_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ParamsError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_what_changes_no_answer_is_taken() -> None:
    """Scripts for vLLM say these."""
    params = SamplingParams(
        watermarking=False, routed_experts_prompt_start=2, skip_reading_prefix_cache=True, stream_interval=4
    )
    assert (params.watermarking, params.routed_experts_prompt_start) == (False, 2)
    assert BeamSearchParams(beam_width=2, max_tokens=1, watermarking=True).watermarking


def test_what_is_named_twice_counts_once() -> None:
    params = SamplingParams(stop_token_ids=[42, 7, 42, 9, 7], bad_words=["bad", "worse", "bad"])
    assert (params.stop_token_ids, params.bad_words) == ([42, 7, 9], ["bad", "worse"])
    assert params.all_stop_token_ids == {7, 9, 42}


def test_log_probabilities_are_counted_from_true() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert type(params.logprobs) is int


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    for make in (SamplingParams, SamplingParams.from_optional):
        with pytest.raises(ParamsError, match=r"'temprature'.*'temperature'") as caught:
            make(temprature=0)
        assert caught.value.param == "temprature"
    with pytest.raises(ConfigError, match=r"'max_modellen'.*'max_model_len'"):
        EngineArgs(max_modellen=5)  # type: ignore[call-arg]


def test_copies_are_equal_and_their_own() -> None:
    params = SamplingParams(stop=["a"], max_tokens=3)
    for other in (copy.deepcopy(params), params.clone(), dataclasses.replace(params)):
        assert other == params
    args = EngineArgs("x", limit_mm_per_prompt={"image": 2})
    again = EngineArgs(**(dataclasses.asdict(args) | {"seed": 1}))
    assert dataclasses.replace(again, seed=None) == args


def test_a_class_that_checks_more_is_checked_whatever_was_found_right_before() -> None:
    class Greedy(SamplingParams):
        def _verify_floats(self) -> None:
            super()._verify_floats()
            if self.temperature:
                raise ParamsError("not greedy")

    SamplingParams(temperature=0.5)
    with pytest.raises(ParamsError, match="not greedy"):
        Greedy(temperature=0.5)
