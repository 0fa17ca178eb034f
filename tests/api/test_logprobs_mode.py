"""`logprobs_mode` of an engine: what answers and prompts report, and what a search reads whatever it is."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from beheld import LLM, AsyncLLM, SamplingParams
from beheld.core.beams import BeamSearchParams
from beheld.core.outputs import Logprob, RequestOutput
from beheld.core.sampling import LogprobsMode
from tests import tiny

PROMPT = "A cat sat on"
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_logprobs": -1, "seed": 0}
DRAWN = SamplingParams(
    temperature=0.7, top_k=4, repetition_penalty=1.2, max_tokens=6, ignore_eos=True, seed=3, logprobs=-1
)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def answers() -> dict[LogprobsMode, RequestOutput]:
    """Of each mode, with the same seed."""
    found = {}
    for mode in LogprobsMode:
        with LLM(str(tiny.checkpoint("llama")), logprobs_mode=mode.value, **OPTIONS) as llm:
            (found[mode],) = llm.generate(PROMPT, DRAWN, use_tqdm=False)
    return found


def steps(output: RequestOutput) -> list[dict[int, Logprob]]:
    entries = output.outputs[0].logprobs
    assert entries is not None
    return list(entries)


def test_the_mode_changes_no_token(answers: dict[LogprobsMode, RequestOutput]) -> None:
    assert len({tuple(output.outputs[0].token_ids) for output in answers.values()}) == 1


def test_processed_numbers_are_those_of_the_four_that_are_kept(answers: dict[LogprobsMode, RequestOutput]) -> None:
    output = answers[LogprobsMode.PROCESSED_LOGPROBS]
    for token, step in zip(output.outputs[0].token_ids, steps(output), strict=True):
        kept = {one: entry.logprob for one, entry in step.items() if entry.logprob > -math.inf}
        assert len(kept) == 4
        assert token in kept
        assert sum(map(math.exp, kept.values())) == pytest.approx(1.0, abs=1e-5)
        assert step[token].rank == 1 + sum(value > kept[token] for value in kept.values())
    assert output.outputs[0].cumulative_logprob == pytest.approx(
        sum(step[token].logprob for token, step in zip(output.outputs[0].token_ids, steps(output), strict=True))
    )


def test_logits_are_log_probabilities_before_they_are_normalised(answers: dict[LogprobsMode, RequestOutput]) -> None:
    for logits, normalised in (
        (LogprobsMode.RAW_LOGITS, LogprobsMode.RAW_LOGPROBS),
        (LogprobsMode.PROCESSED_LOGITS, LogprobsMode.PROCESSED_LOGPROBS),
    ):
        for one, other in zip(steps(answers[logits]), steps(answers[normalised]), strict=True):
            total = math.log(sum(math.exp(entry.logprob) for entry in one.values()))
            assert abs(total) > 0.1, "they were normalised"
            for token, entry in one.items():
                assert entry.logprob - total == pytest.approx(other[token].logprob, abs=1e-4)


def test_logits_before_the_first_penalty_are_the_models(answers: dict[LogprobsMode, RequestOutput]) -> None:
    """Of a token that stands nowhere yet, only the temperature is between them."""
    first, last = (steps(answers[mode])[0] for mode in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS))
    ids = answers[LogprobsMode.RAW_LOGITS].prompt_token_ids or []
    kept = [token for token, entry in last.items() if entry.logprob > -math.inf and token not in ids]
    assert kept
    for token in kept:
        assert last[token].logprob == pytest.approx(first[token].logprob / 0.7, rel=1e-5)


def test_prompts_and_searches() -> None:
    """Prompts have logits where answers have; a search compares the model's log-probabilities, whatever is reported."""
    prompts, scores, beams = {}, {}, {}
    asked = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, logprob_token_ids=[5, 9], logit_bias={5: 3.0}
    )
    for mode in LogprobsMode:
        with LLM(str(tiny.checkpoint("llama")), logprobs_mode=mode.value, **OPTIONS) as llm:
            (output,) = llm.generate(PROMPT, asked, use_tqdm=False)
            entries = list(output.prompt_logprobs or [])[1:]
            ids = (output.prompt_token_ids or [])[1:]
            prompts[mode] = [entry[token].logprob for entry, token in zip(entries, ids, strict=True)]
            (step,) = steps(output)
            # The named tokens are of the mode, with the bias where that is applied.
            scores[mode] = step[5].logprob - step[9].logprob
            beams[mode] = llm.beam_search([{"prompt": PROMPT}], BEAMS)[0].sequences
    first = beams[LogprobsMode.RAW_LOGPROBS]
    for found in beams.values():
        assert [one.tokens for one in found] == [one.tokens for one in first]
        assert [one.cum_logprob for one in found] == pytest.approx([one.cum_logprob for one in first])
    assert all(value < 0 for value in prompts[LogprobsMode.RAW_LOGPROBS])
    assert prompts[LogprobsMode.PROCESSED_LOGPROBS] == prompts[LogprobsMode.RAW_LOGPROBS]
    assert prompts[LogprobsMode.PROCESSED_LOGITS] == prompts[LogprobsMode.RAW_LOGITS]
    assert all(
        a != b for a, b in zip(prompts[LogprobsMode.RAW_LOGITS], prompts[LogprobsMode.RAW_LOGPROBS], strict=True)
    )
    raw, processed = scores[LogprobsMode.RAW_LOGPROBS], scores[LogprobsMode.PROCESSED_LOGPROBS]
    assert processed - raw == pytest.approx(3.0, abs=1e-4)
    assert scores[LogprobsMode.RAW_LOGITS] == pytest.approx(raw, abs=1e-4)
    assert scores[LogprobsMode.PROCESSED_LOGITS] == pytest.approx(processed, abs=1e-4)


def test_a_search_among_other_requests_of_one_engine() -> None:
    """Steps of a search and answers are computed together, each in its own form, in a process too."""
    told = {}

    async def answer(llm: AsyncLLM, count: int) -> Any:
        async def one(number: int) -> Any:
            if number % 2:
                found = [output async for output in llm.beam_search(PROMPT, BEAMS)]
                return [round(one.cumulative_logprob or 0.0, 3) for one in found[-1].outputs]
            found = [output async for output in llm.generate(PROMPT, DRAWN)]
            ids = found[-1].outputs[0].token_ids
            return [round(step[token].logprob, 3) for step, token in zip(steps(found[-1]), ids, strict=True)]

        return await asyncio.gather(*map(one, range(count)))

    for mode in ("raw_logprobs", "processed_logits"):
        llm = AsyncLLM(str(tiny.checkpoint("llama")), engine="process", logprobs_mode=mode, **OPTIONS)
        try:
            told[mode] = asyncio.run(answer(llm, 6))
        finally:
            llm.close()
    assert told["raw_logprobs"][1::2] == told["processed_logits"][1::2]
    assert all(value > 0 for value in told["processed_logits"][0])
    assert all(value < 0 for value in told["raw_logprobs"][0])
    for found in told.values():
        assert found[0::2] == [found[0]] * 3
