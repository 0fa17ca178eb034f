"""A step that fails anywhere, at any statement, is launched again, and nobody's answer tells."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.core.outputs import RequestOutput
from beheld.runner import graphs
from beheld.runner.graphs import DecodeGraphs
from beheld.runner.rows import Rows
from beheld.runner.runner import ModelRunner
from beheld.sample.penalties import PenaltyTable
from beheld.sample.sampler import Sampler
from tests import tiny
from tests.runner.test_graphs import capture, equip

OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 150, "block_size": 4}
OPTIONS |= {"dtype": "float32", "seed": 0, "media_workers": 0}
ENGINES = ["in step", "overlap", "graphs"]
PROMPTS = [{"prompt_token_ids": list(range(10, 10 + n))} for n in (8, 6, 7, 5, 9)]


def _nothing(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that tells, by the tokens it sees, whether one was forgotten or taken twice."""
    logits[sum(ids) % len(logits)] += 3.0
    return logits


GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
# Whatever a choice may depend on that a step leaves behind.
PARAMS = [
    SamplingParams(max_tokens=10, ignore_eos=True, **more)
    for more in (
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.9, "seed": 3, "top_k": 40},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"temperature": 0.0, "logits_processors": [_nothing]},
        {"temperature": 0.0, "min_tokens": 4},
    )
]


@contextmanager
def failing(code: CodeType, call: int, event: int) -> Iterator[list[str]]:
    """Raise before the `event`-th statement of the `call`-th call of a function; tells where that was.

    The last event of a call is its return, behind all statements.
    """
    calls, events, raised = [0], [0], []

    def inside(frame: FrameType, what: str, _: Any) -> Any:
        if what in ("line", "return"):
            events[0] += 1
            if events[0] == event:
                raised.append(f"{code.co_name}, line {frame.f_lineno}")
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return inside

    def called(frame: FrameType, what: str, _: Any) -> Any:
        if raised or frame.f_code is not code:
            return None
        calls[0] += 1
        return inside if calls[0] == call else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield raised
    finally:
        sys.settrace(before)


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Engines that launch in different ways; what is cached is forgotten between runs, unless a test wants it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "capture", capture)
        overlap = request.param != "in step"
        with LLM(str(tiny.checkpoint("llama")), async_scheduling=overlap, **OPTIONS) as made:
            if request.param == "graphs":
                equip(made)
            yield made


def ask(llm: LLM, params: Any = GREEDY, prompts: Any = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, on_error="return")


def told(output: RequestOutput) -> Any:
    """An answer with its log-probabilities."""
    assert output.error is None, output.error
    answer = output.outputs[0]
    steps = [*(answer.logprobs or ()), *(step for step in output.prompt_logprobs or () if step)]
    return tuple(answer.token_ids), [{token: pytest.approx(v.logprob, abs=1e-4) for token, v in s.items()} for s in steps]


def idle(llm: LLM) -> None:
    assert llm._run is not None
    scheduler = llm._run.core.scheduler
    scheduler.check()
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_blocks


def body(function: Callable[..., Any]) -> CodeType:
    return getattr(function, "__wrapped__", function).__code__


PLACES = [
    *(ModelRunner.launch, ModelRunner._sample, ModelRunner._forward, ModelRunner.collect),
    *(Sampler.sample, Sampler._choose, Sampler.append, PenaltyTable.append, PenaltyTable.admit, PenaltyTable.rewind),
    *(Rows.admit, Rows.append_blocks, DecodeGraphs.replay, DecodeGraphs.refresh_tables),
]


@pytest.mark.parametrize("function", PLACES, ids=lambda f: f.__qualname__)
def test_a_failure_after_any_statement_changes_no_answer(llm: LLM, function: Callable[..., Any]) -> None:
    llm.reset_prefix_cache()
    clean = [told(output) for output in ask(llm, PARAMS)]
    overlap = llm._run.core._overlap  # type: ignore[union-attr]
    failures = 0
    for call in (2, 5):
        for event in range(1, 200):
            llm.reset_prefix_cache()
            with failing(body(function), call, event) as where:
                outputs = ask(llm, PARAMS)
            if not where:
                break
            failures += 1
            if overlap and function is ModelRunner.collect:
                # The next step may have used the rows and blocks already.
                assert all(output.error is not None for output in outputs), where
            else:
                assert [told(output) for output in outputs] == clean, where
            # Nor did it leave wrong keys and values in what later prompts share.
            assert [told(output) for output in ask(llm, PARAMS)] == clean, where
            idle(llm)
    print(function.__qualname__, failures)
