"""Ctrl-C at any moment ends a run, and the next one, as in a notebook, is like any other."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.api.run import OfflineRun
from beheld.engine.core import EngineCore
from beheld.runner.runner import ModelRunner
from beheld.scheduler.queue import WaitingQueue
from beheld.scheduler.scheduler import Scheduler
from beheld.utils.interrupts import uninterrupted
from tests import tiny
from tests.engine.test_retry import before_statement, body, failing, idle

FAMILY = "qwen2_5_vl"
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a program that is started in the foreground; a shell makes those in its background deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", params=["in step", "overlap"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 100}
    options |= {"dtype": "float32", "seed": 0, "media_workers": 0, "async_scheduling": request.param == "overlap"}
    with LLM(str(tiny.checkpoint(FAMILY)), **options) as made:
        yield made


def prompts(seed: int) -> list[Any]:
    picture = {"image": tiny.picture(56, 56, seed)}
    text = {"prompt_token_ids": list(range(10, 18))}
    return [{"prompt": tiny.prompt(FAMILY, 1, 0, "Hi?"), "multi_modal_data": picture}, text]


def ask(llm: LLM, seed: int) -> list[list[int]]:
    outputs = llm.generate(prompts(seed), GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def core_of(llm: LLM) -> EngineCore:
    assert llm._run is not None
    return llm._run.core


STEPS = [ModelRunner.launch, ModelRunner._sample, ModelRunner.collect, EngineCore._step, EngineCore._update]


@pytest.mark.parametrize("function", STEPS, ids=lambda function: function.__qualname__)
def test_an_interrupt_before_any_statement(llm: LLM, function: Callable[..., Any]) -> None:
    """In the step that encodes a picture, and in the next: the picture is answered as ever."""
    for call in (1, 2):
        for event in range(1, 100):
            llm.reset_prefix_cache()
            seed = 1000 * STEPS.index(function) + 100 * call + event
            with failing(body(function), call, event, KeyboardInterrupt) as where:
                try:
                    ask(llm, seed)
                except KeyboardInterrupt:
                    assert where
            if not where:
                break
            first = ask(llm, seed)
            idle(llm)
            llm.reset_prefix_cache()
            assert ask(llm, seed) == first, where
            runner = core_of(llm).executor.runner  # type: ignore[attr-defined]
            stats = core_of(llm).scheduler.stats()
            assert stats.num_embeds == sum(len(kept) for kept in runner.encoder._embeds.values()), where
        assert event > 2, "it was interrupted"


BOOKS = [OfflineRun._add, Scheduler.add, WaitingQueue.push, Scheduler.stop, Scheduler._finish]


@pytest.mark.parametrize("function", BOOKS, ids=lambda function: function.__qualname__)
def test_a_signal_before_any_statement_that_keeps_books(llm: LLM, function: Callable[..., Any]) -> None:
    """Where requests are queued and where they end, by a stop string too: nothing is left of a run that ended so."""
    asked = [{"prompt_token_ids": list(range(first, first + 8))} for first in range(10, 20)]
    clean = llm.generate(asked, GREEDY, use_tqdm=False)
    stop = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, stop=[clean[0].outputs[0].text[:2]])
    params = [stop, *[GREEDY] * 9]

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    for event in range(1, 100):
        with before_statement(body(function), 2 if function in BOOKS[:3] else 1, event, interrupt) as where:
            try:
                llm.generate(asked, params, use_tqdm=False)
            except KeyboardInterrupt:
                assert where
        if not where:
            break
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        idle(llm)
        again = llm.generate(asked, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in clean], where
    assert event > 2, "it was interrupted"


@pytest.mark.parametrize("where", ["inside", "behind"])
def test_an_interrupt_of_taking_a_result_in(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    clean = ask(llm, 1)
    scheduler = core_of(llm).scheduler
    update, count = scheduler.update, [0]

    def once(plan: Any, result: Any, seconds: float | None = None) -> Any:
        count[0] += 1
        if count[0] == 3 and where == "inside":
            scheduler._flights.pop(plan.id)
            raise KeyboardInterrupt
        events = update(plan, result, seconds)
        if count[0] == 3:
            raise KeyboardInterrupt
        return events

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "update", once)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, 1)
    assert ask(llm, 1) == clean
    idle(llm)


def test_a_signal_waits_for_the_end_of_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = ask(llm, 2)
    runner = core_of(llm).executor.runner  # type: ignore[attr-defined]
    launch, ended = runner.launch, []

    def signalled(plan: Any) -> Any:
        if not ended:
            signal.raise_signal(signal.SIGINT)
        handle = launch(plan)
        ended.append(plan.id)
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", signalled)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, 2)
    assert len(ended) == 1, "this step was launched, and none after it"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ask(llm, 2) == clean
    idle(llm)


def test_a_second_signal_does_not_wait() -> None:
    reached = []

    def twice() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_one_s_own_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
