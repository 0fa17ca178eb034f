"""A step that fails anywhere, at any statement, is launched again, and nobody's answer tells."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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
from tests.long import LONG
from tests.runner.test_graphs import capture, equip

OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 150, "block_size": 4}
OPTIONS |= {"dtype": "float32", "seed": 0, "media_workers": 0}
ENGINES = ["in step", "overlap", "graphs"]
PROMPTS = [{"prompt_token_ids": list(range(10, 10 + n))} for n in (8, 6, 7)]


def prompt(*tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(tokens)}


OUT = torch.OutOfMemoryError


def _by_all(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor whose choice differs if a token was forgotten or taken twice."""
    logits[sum(ids) % len(logits)] += 3.0
    return logits


# Whatever a choice may depend on that a step leaves behind.
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True, **more)
    for more in (
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"temperature": 0.0, "logits_processors": [_by_all]},
    )
]


@contextmanager
def failing(code: CodeType, call: int, event: int, error: type[BaseException] = OUT) -> Iterator[list[str]]:
    """Raise before the `event`-th statement of the `call`-th call of a function; tells where that was."""

    def fail() -> None:
        raise error("CUDA out of memory.")

    with before_statement(code, call, event, fail) as where:
        yield where


@contextmanager
def before_statement(code: CodeType, call: int, event: int, act: Callable[[], object]) -> Iterator[list[str]]:
    """Act before the `event`-th statement of the `call`-th call of a function; tells where that was.

    The last event of a call is its return, behind all statements.
    """
    calls, events = [0], [0]
    raised: list[str] = []

    def inside(frame: FrameType, what: str, _: Any) -> Any:
        if what in ("line", "return"):
            events[0] += 1
            if events[0] == event:
                raised.append(f"{code.co_name}, line {frame.f_lineno}")
                act()
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


def ask(llm: LLM, prompts: Any = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, PARAMS, use_tqdm=False, on_error="return")


def told(output: RequestOutput) -> Any:
    """An answer with its log-probabilities."""
    assert output.error is None, output.error
    answer = output.outputs[0]
    said = [{token: pytest.approx(v.logprob, abs=1e-4) for token, v in s.items()} for s in answer.logprobs or ()]
    return tuple(answer.token_ids), said


def idle(llm: LLM) -> None:
    assert llm._run is not None
    scheduler = llm._run.core.scheduler
    scheduler.check()
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_blocks


def body(function: Callable[..., Any]) -> CodeType:
    return getattr(function, "__wrapped__", function).__code__


PLACES = [ModelRunner.launch, ModelRunner._sample, ModelRunner.collect, Sampler.append]
OF_GRAPHS = [DecodeGraphs.replay, DecodeGraphs.refresh_tables]
OTHERS = [
    *(ModelRunner._forward, Sampler.sample, Sampler._choose, PenaltyTable.admit, PenaltyTable.rewind),
    *(Rows.admit, Rows.append_blocks),
]


def fail_everywhere(llm: LLM, function: Callable[..., Any], calls: Sequence[int]) -> int:
    """Fail once before each statement of each of these calls of a function; how often that was."""
    llm.reset_prefix_cache()
    clean = [told(output) for output in ask(llm)]
    longer = [
        {"prompt_token_ids": [*prompt["prompt_token_ids"], *ids]}
        for prompt, (ids, _) in zip(PROMPTS, clean, strict=True)
    ]
    follow = [told(output) for output in ask(llm, longer)]
    overlap = llm._run.core._depth  # type: ignore[union-attr]
    failures = 0
    for call in calls:
        for event in range(1, 100):
            llm.reset_prefix_cache()
            with failing(body(function), call, event) as where:
                outputs = ask(llm)
            if not where:
                break
            failures += 1
            if overlap and function is ModelRunner.collect:
                # The next step may have used the rows and blocks already.
                assert all(output.error is not None for output in outputs), where
            else:
                assert [told(output) for output in outputs] == clean, where
            idle(llm)
            if function in (ModelRunner._sample, ModelRunner.collect):
                # Nor did it leave wrong keys and values in what later prompts share.
                assert [told(output) for output in ask(llm, longer)] == follow, where
    return failures


@pytest.mark.parametrize("function", PLACES, ids=lambda function: function.__qualname__)
def test_a_failure_after_any_statement_changes_no_answer(llm: LLM, function: Callable[..., Any]) -> None:
    assert fail_everywhere(llm, function, [3]) > 2


MATES = [prompt(*range(10 + n, 40 + n)) for n in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def _refuse(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such token")


def _refuse_later(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits if len(ids) < 3 else _refuse(ids, logits)


@pytest.mark.parametrize("culprit", [_refuse, _refuse_later], ids=["prompt", "answer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlap"])
def test_beside_a_culprit_the_others_get_the_same_bits(
    dtype: str, overlap: bool, culprit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retried alone, a sequence's products have one row instead of four and round otherwise, in float32 too."""
    seen: list[torch.Tensor] = []
    sample = Sampler.sample

    def noted(self: Sampler, logits_BV: torch.Tensor, rows: Any, *rest: Any) -> Any:
        seen.append(logits_BV[: len(MATES)].clone())
        return sample(self, logits_BV, rows, *rest)

    monkeypatch.setattr(Sampler, "sample", noted)
    options = {**OPTIONS, "dtype": dtype, "async_scheduling": overlap, "enable_prefix_caching": False}
    with LLM(str(tiny.checkpoint("llama")), **options) as llm:
        # With overlap, the step after the failing one is planned before the culprit is known.
        steps = (1 if culprit is _refuse else 4) + overlap
        short = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        bad = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logits_processors=[culprit])
        prompts = [*MATES, prompt(*range(50, 80))]
        llm.generate(prompts, [GREEDY] * 3 + [short], use_tqdm=False)
        clean = [step for step in seen if len(step) == len(MATES)]
        seen.clear()
        outputs = llm.generate(prompts, [GREEDY] * 3 + [bad], use_tqdm=False, on_error="return")
        assert llm.stats().retried == 1
        assert "no such token" in str(outputs[3].error)
        whole = [step for step in seen if len(step) == len(MATES)]
        # The step that failed had its logits, too.
        failed = 0 if culprit is _refuse else 3
        del whole[failed]
        assert len(whole) == len(clean) == GREEDY.max_tokens
        assert all(torch.equal(one, other) for one, other in zip(whole, clean, strict=True))
        idle(llm)


@pytest.mark.parametrize("llm", ["graphs"], indirect=True)
@pytest.mark.parametrize("function", OF_GRAPHS, ids=lambda function: function.__qualname__)
def test_a_replay_that_fails_is_launched_again_whole(llm: LLM, function: Callable[..., Any]) -> None:
    """The first one, for which all tables wait that were written in other steps."""
    assert fail_everywhere(llm, function, [1]) > 2


@pytest.mark.skipif(not LONG, reason="long: set BEHELD_LONG=1")
@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__qualname__)
def test_a_failure_after_any_statement_further_in(llm: LLM, function: Callable[..., Any]) -> None:
    fail_everywhere(llm, function, [2, 5])
