"""Greedy answers of an engine with a form for a single row, and without it."""

from __future__ import annotations

from typing import Any

import pytest

from beheld import LLM, SamplingParams
from tests import tiny


def same_answers(family: str, variable: str, monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    """Compare in bfloat16.

    Args:
        variable: switches the form.
        calls: grows whenever the form is called: in its trial, and once for each layer in a captured pass.
    """
    answers = []
    for few in ("1", "0"):
        monkeypatch.setenv(variable, few)
        llm = LLM(str(tiny.checkpoint(family)), dtype="bfloat16", max_num_seqs=4, gpu_memory_utilization=0.2)
        try:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
            prompts = [{"prompt_token_ids": [5 + n * 7 % 90 for n in range(length)]} for length in (3, 40)]
            answers.append([llm.generate([each], params, use_tqdm=False)[0].outputs[0] for each in prompts])
            assert llm.stats().retried == 0
        finally:
            llm.close()
        assert bool(calls) == (few == "1")
        calls.clear()
    for one, other in zip(*answers, strict=True):
        # Roundings differ, so an answer may leave the other where two tokens are nearly equal.
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        same = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), 24)
        for first, second in zip(one.logprobs[: same + 1], other.logprobs[: same + 1], strict=True):
            best, least = (max(each.logprob for each in step.values()) for step in (first, second))
            assert abs(best - least) < 0.2
