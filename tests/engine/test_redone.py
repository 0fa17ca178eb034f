"""A step that fails amid recurrent states, which it overwrites, is not launched again: its sequences start again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.attention import recurrent
from beheld.runner.runner import ModelRunner
from tests import tiny
from tests.engine.test_retry import OPTIONS, PROMPTS, ask, body, failing, idle, told
from tests.long import LONG

STEPS = ["in step", "overlap"]


@pytest.fixture(scope="module", params=STEPS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    overlap = request.param == "overlap"
    with LLM(str(tiny.checkpoint("qwen3_next")), async_scheduling=overlap, **OPTIONS) as made:
        yield made


# In the first of these calls prompts are computed; later ones decode. Of the statements, every fifth.
PLACES: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (ModelRunner._forward, (3,)),
    (ModelRunner._sample, (3,)),
    (recurrent._decode, (5,)),
    (recurrent._prefill, (8,)),
]
STRIDE = 1 if LONG else 5


@pytest.mark.parametrize(("function", "calls"), PLACES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_failure_after_any_statement_changes_no_answer(
    llm: LLM, function: Callable[..., Any], calls: tuple[int, ...]
) -> None:
    llm.reset_prefix_cache()
    clean = [told(output) for output in ask(llm)]
    for call in calls:
        for event in range(2, 60, STRIDE):
            llm.reset_prefix_cache()
            with failing(body(function), call, event) as where:
                outputs = ask(llm)
            if not where:
                break
            assert [told(output) for output in outputs] == clean, where
            idle(llm)
        assert event > 2
    assert [told(output) for output in ask(llm)] == clean, "nothing wrong is shared"


def test_of_a_batch_only_the_culprit_of_sampling_fails(llm: LLM) -> None:
    def broken(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) > 2:
            raise ValueError("no such token")
        return logits

    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True) for _ in PROMPTS]
    clean = llm.generate(PROMPTS, params, use_tqdm=False)
    params[1] = SamplingParams(temperature=0, max_tokens=6, logits_processors=[broken], ignore_eos=True)
    found = llm.generate(PROMPTS, params, use_tqdm=False, on_error="return")
    assert "no such token" in str(found[1].error)
    for place in (0, 2):
        assert found[place].outputs[0].token_ids == clean[place].outputs[0].token_ids
    idle(llm)


def test_what_fails_every_time_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(recurrent, "_decode", broken)
        outputs = ask(llm)
    assert all("out of memory" in str(output.error) for output in outputs)
    idle(llm)
    assert all(output.error is None for output in ask(llm))
