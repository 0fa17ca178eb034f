"""Sealing: nothing is left open, every id is one of the model's, and words become ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ParamsError
from beheld.core.params import RawParams, SamplingParams, StepParams
from beheld.core.sampling import LogprobsMode, Sampling
from beheld.core.structured_outputs import ReasoningFormat
from beheld.inputs.sampling.resolve_sampling import habits, recommended
from tests.inputs import pipes

FAMILY = "qwen2"


def seal(prompt: int = 10, seed: int = 7, family: str = FAMILY, **params: Any) -> Sampling:
    return pipes.shared(family)._sampling.resolve(SamplingParams(**params), range(prompt), seed)


def test_lengths() -> None:
    assert seal(max_tokens=5).max_tokens == 5
    assert seal(max_tokens=None).max_tokens == 1014
    assert seal(max_tokens=5000).max_tokens == 1014
    assert seal(1023, max_tokens=None).max_tokens == 1
    assert seal(1020, max_tokens=50, min_tokens=20).min_tokens == 4


@pytest.mark.parametrize(("asked", "most", "made"), [(None, 7, 7), (5, 7, 5), (50, 7, 7), (None, 5000, 1014)])
def test_an_answer_may_end_with_its_audio(asked: int | None, most: int, made: int) -> None:
    resolve = pipes.shared(FAMILY)._sampling.resolve
    assert resolve(SamplingParams(max_tokens=asked, min_tokens=0), range(10), 7, most=most).max_tokens == made


def test_equal_parameters_in_a_row_are_resolved_for_their_own_prompts() -> None:
    resolve = pipes.shared(FAMILY)._sampling.resolve
    params = SamplingParams(max_tokens=50, min_tokens=20, temperature=0.5)
    made = [resolve(params, range(prompt), seed) for prompt, seed in ((10, 7), (1020, 8), (10, 7))]
    assert [(one.max_tokens, one.min_tokens, one.seed) for one in made] == [(50, 20, 7), (4, 4, 8), (50, 20, 7)]
    assert made[0] == made[2] == resolve(SamplingParams(max_tokens=50, min_tokens=20, temperature=0.5), range(10), 7)


def test_parameters_that_changed_since_are_resolved_anew() -> None:
    resolve = pipes.shared(FAMILY)._sampling.resolve
    params = SamplingParams(top_k=1, stop_token_ids=[3])
    resolve(params, range(10), 7)
    assert params.stop_token_ids is not None
    params.stop_token_ids.append(4)
    assert resolve(params, range(10), 7).own_stop_ids == {3, 4}
    params.stop_token_ids = None
    assert resolve(params, range(10), 7).own_stop_ids == frozenset()
    params.top_k = 2
    assert resolve(params, range(10), 7).top_k == 2
    for wrong in (True, 2.0, "2"):
        params.top_k = wrong  # type: ignore[assignment]
        with pytest.raises(ParamsError, match="top_k"):
            resolve(params, range(10), 7)


def test_seeds() -> None:
    assert seal().seed == 7
    assert seal(seed=7).seed == 7
    assert pipes.shared(FAMILY)._sampling.resolve(SamplingParams(seed=3), (1,), 9).seed == 3
    assert pipes.shared(FAMILY)._sampling.resolve(SamplingParams(seed=-1), (1,), 9).seed == 2**64 - 1


def test_stops() -> None:
    info = pipes.info(FAMILY)
    assert info.eos_ids
    assert seal().stop_ids == info.eos_ids
    assert seal(stop_token_ids=[3, 4]).stop_ids == info.eos_ids | {3, 4}
    assert seal(stop_token_ids=[3, 4]).own_stop_ids == {3, 4}
    assert seal(ignore_eos=True).stop_ids == frozenset()
    assert seal(ignore_eos=True, stop_token_ids=[3]).stop_ids == {3}


def test_values() -> None:
    sealed = seal(temperature=0.5, top_k=-1, top_p=0.3, logit_bias={3: 1.5}, allowed_token_ids=[1, 2], logprobs=4)
    assert (sealed.temperature, sealed.top_k, sealed.top_p) == (0.5, 0, 0.3)
    assert sealed.logit_bias == ((3, 1.5),)
    assert sealed.allowed_token_ids == (1, 2)
    # Each once, however often it is sent.
    assert seal(allowed_token_ids=[2, 1, 2] * 100).allowed_token_ids == (2, 1)
    assert sealed.logprobs == 4
    assert seal(temperature=0).greedy
    assert seal(temperature=1e-9).temperature == 0.0


@pytest.mark.parametrize(
    "params", [{"stop_token_ids": [512]}, {"allowed_token_ids": [0, 5000]}, {"logit_bias": {512: 1.0}}]
)
def test_ids_beyond_the_vocabulary_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ParamsError, match="512") as caught:
        seal(**params)
    assert caught.value.param == next(iter(params))


def test_bad_words_stand_at_the_start_and_after_a_blank() -> None:
    for family in ("qwen2", "llama"):
        tokenizer = pipes.shared(family).tokenizer
        found = seal(family=family, bad_words=["picture"]).bad_words_ids
        bare = tuple(tokenizer("picture", add_special_tokens=False)["input_ids"])
        assert bare in found
        written = tuple(tokenizer("a picture", add_special_tokens=False)["input_ids"])
        assert any(written[-len(ids) :] == ids for ids in found), family
    with pytest.raises(ParamsError, match="empty word"):
        seal(bad_words=["  "])


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": 5},
        {"allowed_token_ids": 3},
        {"logit_bias": [1, 2]},
        {"structured_outputs": {"choice": ["a"]}},
        {"spaces_between_special_tokens": False, "skip_special_tokens": False},
        {"logits_processors": len},
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(ParamsError) as caught:
        SamplingParams(**params)
    assert caught.value.param == next(iter(params))


def test_changed_fields_are_checked_again() -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ParamsError, match="top_p"):
        pipes.shared(FAMILY)._sampling.resolve(params, (1,), 0)


def test_extra_args_that_nothing_reads_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipes.make(FAMILY)
    for _ in range(2):
        pipe._sampling.resolve(SamplingParams(extra_args={"ngram_size": 3}), (1,), 0)
    (told,) = (record.getMessage() for record in caplog.records if "extra_args" in record.getMessage())
    assert told.startswith("extra_args ('ngram_size') of a request are not read")


def test_what_computes_with_log_probabilities_gets_the_models_own() -> None:
    pipe = pipes.make(FAMILY, {"logprobs_mode": LogprobsMode.PROCESSED_LOGITS})
    for made, mode in (
        (SamplingParams, LogprobsMode.PROCESSED_LOGITS),
        (RawParams, LogprobsMode.RAW_LOGPROBS),
        (StepParams, LogprobsMode.RAW_LOGPROBS),
        (SamplingParams, LogprobsMode.PROCESSED_LOGITS),
    ):
        assert pipe._sampling.resolve(made(logprobs=1), (1,), 0).logprobs_mode is mode


def test_what_is_not_built_is_refused() -> None:
    pipe = pipes.make(FAMILY, max_logprobs=3)
    with pytest.raises(ParamsError, match="max_logprobs=3"):
        pipe._sampling.resolve(SamplingParams(logprobs=4), (1,), 0)
    with pytest.raises(ConfigError, match="new_req_logits_processor"):
        pipes.make(FAMILY, {"logits_processors": (dict,)})
    with pytest.raises(ConfigError, match="The logits processor 'nowhere:Nothing' cannot be loaded"):
        pipes.make(FAMILY, {"logits_processors": ("nowhere:Nothing",)})
    bare = pipes.make(FAMILY, skip_tokenizer_init=True)
    for params in (SamplingParams(stop=["x"]), SamplingParams(bad_words=["x"])):
        with pytest.raises(ParamsError, match="tokenizer"):
            bare._sampling.resolve(params, (1,), 0)


def test_processors_of_engine_and_request() -> None:
    def one(ids: Any, logits: Any) -> Any:
        return logits

    def two(ids: Any, logits: Any) -> Any:
        return logits

    pipe = pipes.make(FAMILY, {"logits_processors": (one,)})
    assert pipe._sampling.resolve(SamplingParams(logits_processors=[two]), (1,), 0).processors == (one, two)


def test_processors_that_take_other_arguments_are_refused_before_any_step() -> None:
    """In a step, they would fail on one rank alone."""
    takes = r"takes \(output_ids, logits\) or \(prompt_ids"
    for bad in (lambda a: a, lambda a, b, c, d: a):
        with pytest.raises(ParamsError, match=takes) as caught:
            SamplingParams(logits_processors=[bad])
        assert caught.value.param == "logits_processors"
    with pytest.raises(ConfigError, match=takes):
        pipes.make(FAMILY, {"logits_processors": (lambda a: a,)})

    class Makes:
        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            return lambda a: a

    pipe = pipes.make(FAMILY, {"logits_processors": (Makes,)})
    with pytest.raises(ParamsError, match=takes):
        pipe._sampling.resolve(SamplingParams(), (1,), 0)


def test_recommended_parameters() -> None:
    args = EngineArgs()
    made = recommended({"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True, "x": 1}, args)
    assert (made.temperature, made.top_k, made.max_tokens) == (0.6, 20, 99)
    assert recommended({"do_sample": False, "temperature": 0.6, "top_p": 0.1}, args) == SamplingParams(temperature=0.0)
    assert recommended({"temperature": 0.6}, EngineArgs(generation_config="vllm")) == SamplingParams()
    over = EngineArgs(override_generation_config={"temperature": 0.2})
    assert recommended({"temperature": 0.6}, over).temperature == 0.2
    path = Path(pipes.info("qwen2_5_vl").path) / "generation_config.json"
    stated = json.loads(path.read_text())
    assert pipes.shared("qwen2_5_vl").default_params().repetition_penalty == stated["repetition_penalty"]


class Banned:
    """As vLLM's processor classes: made once with three arguments, asked for a function for each request."""

    def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
        self.device = device

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        banned = (params.extra_args or {}).get("banned")
        if banned is None:
            return None
        if not isinstance(banned, int):
            raise ValueError("banned must be a number")

        def process(output_ids: Any, logits: Any) -> Any:
            logits[banned] = float("-inf")
            return logits

        return process


def test_classes_make_a_function_for_each_request_that_wants_one() -> None:
    pipe = pipes.make(FAMILY, {"logits_processors": (Banned,)})
    assert pipe._sampling.resolve(SamplingParams(), (1,), 0).processors == ()
    (process,) = pipe._sampling.resolve(SamplingParams(extra_args={"banned": 2}), (1,), 0).processors
    assert process([], [0.0, 0.0, 0.0]) == [0.0, 0.0, float("-inf")]
    with pytest.raises(ParamsError, match="banned must be a number"):
        pipe._sampling.resolve(SamplingParams(extra_args={"banned": "x"}), (1,), 0)
    by_name = pipes.make(FAMILY, {"logits_processors": ("tests.inputs.test_resolve_sampling:Banned",)})
    assert len(by_name._sampling.resolve(SamplingParams(extra_args={"banned": 2}), (1,), 0).processors) == 1


BART = {"forced_bos_token_id": 0, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3, "num_beams": 3}


def test_what_a_checkpoint_does_to_every_answer() -> None:
    info = pipes.info(FAMILY)
    found = habits(BART, EngineArgs(), info)
    assert found.no_repeat_ngram == 3
    assert found.forced_ids(1, 20) == ((20, 2), (1, 0))
    assert found.forced_ids(7, 20) == ((26, 2),)
    # Where the answer has one token, the end has the last word.
    assert found.forced_ids(1, 1)[0] == (1, 2)
    assert habits(BART, EngineArgs(generation_config="vllm"), info).forced_ids(1, 9) == ()
    off = EngineArgs(override_generation_config={"forced_eos_token_id": None, "no_repeat_ngram_size": 0})
    assert habits(BART, off, info).forced_ids(1, 9) == ((1, 0),)
    assert habits(BART, off, info).no_repeat_ngram == 0
    assert seal().forced_ids == ()


def test_beams_and_foreign_tokens_are_refused() -> None:
    info = pipes.info(FAMILY)
    with pytest.raises(ConfigError, match="Beam search"):
        habits({}, EngineArgs(override_generation_config={"num_beams": 2}), info)
    with pytest.raises(ConfigError, match="forced_bos_token_id=512"):
        habits({"forced_bos_token_id": 512}, EngineArgs(), info)


@pytest.mark.case(104)
@pytest.mark.parametrize("value", [1e-7, 1e-38, 1e-41, 5e-324])
def test_penalties_that_leave_nothing_finite_are_refused(value: float) -> None:
    with pytest.raises(ParamsError) as caught:
        seal(repetition_penalty=value)
    assert caught.value.param == "repetition_penalty"
    assert seal(repetition_penalty=1e-6).repetition_penalty == 1e-6


@pytest.mark.case(104)
def test_allowed_ids_of_which_none_is_left_are_refused() -> None:
    ends = sorted(pipes.info(FAMILY).eos_ids)
    with pytest.raises(ParamsError, match="min_tokens") as caught:
        seal(allowed_token_ids=ends, min_tokens=1, max_tokens=4)
    assert caught.value.param == "allowed_token_ids"
    assert seal(allowed_token_ids=ends, max_tokens=4).allowed_token_ids == tuple(ends)
    assert seal(allowed_token_ids=[*ends, 7], min_tokens=1, max_tokens=4).min_tokens == 1
    words = seal(bad_words=["a"]).bad_words_ids
    for ids in words:
        with pytest.raises(ParamsError) as caught:
            seal(bad_words=["a"], allowed_token_ids=[word[-1] for word in words])
        assert caught.value.param == "bad_words"
        assert seal(bad_words=["a"], allowed_token_ids=[ids[-1], 9]).allowed_token_ids == (ids[-1], 9)


@pytest.mark.parametrize(("opening", "close"), [("<think>", "<|im_end|>"), ("<|im_start|>", "</think>")])
def test_a_budget_needs_marks_of_one_token(opening: str, close: str) -> None:
    """A mark of several tokens can be written with other tokens too, so an open or a close would be missed."""
    resolve = pipes.shared(FAMILY)._sampling.resolve
    params = SamplingParams(max_tokens=20, thinking_token_budget=3)
    with pytest.raises(ParamsError, match="several tokens"):
        resolve(params, (1,), 0, ReasoningFormat(opening, close, False))
    if opening == "<think>":
        # Here the prompt has begun the reasoning.
        made = resolve(params, (1,), 0, ReasoningFormat(opening, close, True)).thinking
        assert made is not None
        assert made.open_id is None
        assert made.close_id == pipes.shared(FAMILY)._sampling._tokenizer.convert_tokens_to_ids(close)


def test_blanks_may_precede_the_reasoning() -> None:
    made = (
        pipes.shared(FAMILY)
        ._sampling.resolve(
            SamplingParams(max_tokens=20, thinking_token_budget=3),
            (1,),
            0,
            ReasoningFormat("<|im_start|>", "<|im_end|>", False),
        )
        .thinking
    )
    assert made is not None
    decode = pipes.shared(FAMILY)._sampling._tokenizer.decode
    texts = {token: decode([token]) for token in range(419)}
    assert made.blank_ids == {token for token, text in texts.items() if text.isspace()}
    assert any("\n" in texts[token] for token in made.blank_ids)
