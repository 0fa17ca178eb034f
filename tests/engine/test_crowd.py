"""A crowd of requests of all kinds, in steps that overlap, is answered as each request alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.core.structured_outputs import StructuredOutputs
from tests import tiny

FAMILY = "qwen2_5_vl"
OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_model_len": 256, "media_workers": 0, "block_size": 4}
# What a request may ask for; a crowd has all of them, each with a seed, a length and a prompt of its own.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.3, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1, "n": 2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.7, "min_tokens": 3},
    {"temperature": 0.8, "bad_words": ["a", "bc", "the"], "logit_bias": {15: 4.0}},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="[ab]{3,9}")},
]


def crowd(count: int) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts of all lengths, some with pictures that others have too, and what each asks for."""
    chance = random.Random(7)
    prompts: list[Any] = []
    params = []
    for n in range(count):
        if n % 4 == 3:
            pixels = tiny.picture(56, 56, n % 3)
            prompts.append({"prompt": tiny.prompt(FAMILY, 1, 0, "Hi?"), "multi_modal_data": {"image": pixels}})
        else:
            prompts.append({"prompt_token_ids": chance.choices(range(5, 90), k=chance.randrange(1, 120))})
        own = KINDS[n % len(KINDS)]
        length = max(own.get("min_tokens", 0), chance.choice((1, 2, 7, 25)))
        params.append(SamplingParams(seed=n, max_tokens=length, ignore_eos="structured_outputs" not in own, **own))
    return prompts, params


def told(outputs: list[Any]) -> list[Any]:
    """Tokens, and how each answer ended."""
    return [[(answer.token_ids, answer.finish_reason) for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize("draw", ["row by row", "all at once"])
def test_a_crowd_is_answered_as_each_alone(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn as on a CPU, and as on a GPU."""
    prompts, params = crowd(4 * len(KINDS))
    path = str(tiny.checkpoint(FAMILY))
    with LLM(path, max_num_seqs=1, async_scheduling=False, **OPTIONS) as llm:
        alone = told(llm.generate(prompts, params, use_tqdm=False))
    with LLM(path, max_num_seqs=9, max_num_batched_tokens=64, async_scheduling=True, **OPTIONS) as llm:
        core: Any = llm._run.core  # type: ignore[union-attr]
        sampler = core.executor.runner.sampler
        if draw == "all at once":
            monkeypatch.setattr(sampler, "_sample_on_cpu", sampler._sample_at_once)
        sample, mates = sampler.sample, []
        monkeypatch.setattr(sampler, "sample", lambda *args: mates.append(len(args[1])) or sample(*args))
        together = told(llm.generate(prompts, params, use_tqdm=False))
        assert core.stats().retried == 0
    assert together == alone
    assert sum(count > 4 for count in mates) > 20, "steps with many kinds at once"
    assert len(set(map(str, alone))) > len(KINDS), "answers differ, or nothing is shown"
