"""What goes wrong on the device stays with whom it concerns: NaN, failing towers, lack of memory, a lost device."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from beheld import LLM, AsyncLLM, SamplingParams
from beheld.core.errors import EngineDeadError, StepError
from beheld.core.outputs import RequestOutput
from beheld.core.plan import StepPlan, StepResult
from beheld.engine.core import EngineCore
from beheld.inputs.pipeline import RequestOrder
from beheld.runner import faults
from beheld.server.errors import http_error
from tests import tiny
from tests.fakes import FakeRunner, fake_capacity, fake_config, fake_info, fake_request

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 16, "block_size": 4},
}


@pytest.fixture(scope="module", params=sorted(ENGINES))
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Engines that plan in different ways."""
    options = {"max_model_len": 128, "max_num_seqs": 6, "num_gpu_blocks_override": 200, **ENGINES[request.param]}
    # What is replaced in a test is called in every step: a graph would not.
    options |= {"enforce_eager": torch.cuda.is_available()}
    with LLM(str(tiny.checkpoint("qwen2_vl")), dtype="float32", seed=0, media_workers=0, **options) as made:
        yield made


def runner_of(llm: LLM) -> Any:
    assert llm._run is not None
    return llm._run.core.executor.runner  # type: ignore[attr-defined]


def ask(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, on_error="return")


def ids(output: RequestOutput) -> tuple[int, ...]:
    assert output.error is None, output.error
    return tuple(output.outputs[0].token_ids)


def prompt(*tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(tokens)}


def picture(seed: int) -> dict[str, Any]:
    return {"prompt": tiny.prompt("qwen2_vl", 1, 0, "Hi?"), "multi_modal_data": {"image": tiny.picture(56, 56, seed)}}


def idle(llm: LLM) -> None:
    """Nothing is held once nothing runs."""
    assert llm._run is not None
    scheduler = llm._run.core.scheduler
    scheduler.check()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


POISON = 40
MATES = [prompt(*range(10 + n, 40)) for n in range(3)]
LONG = [*range(50, 90)]


@pytest.mark.parametrize("where", [0, 17, 39], ids=["first token", "middle", "last token"])
def test_73_nan_ends_one_request_and_leaves_no_block_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    adapter = runner_of(llm)._adapter
    tokens = [*LONG[:where], POISON, *LONG[where + 1 :]]
    llm.reset_prefix_cache()
    clean = [ids(output) for output in ask(llm, [prompt(*tokens), *MATES])]
    llm.reset_prefix_cache()
    embed = adapter.embed

    def poisoned(ids_T: torch.Tensor) -> torch.Tensor:
        return embed(ids_T).masked_fill((ids_T == POISON).unsqueeze(-1), float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "embed", poisoned)
        bad, *mates = ask(llm, [prompt(*tokens), *MATES])
    assert isinstance(bad.error, StepError)
    answer = http_error(bad.error)
    assert (answer.status, answer.code) == (500, "nan")
    assert [ids(mate) for mate in mates] == clean[1:]
    idle(llm)
    (again,) = ask(llm, [prompt(*tokens)])
    assert ids(again) == clean[0], "nothing that was broken was kept"
    assert again.usage.cached_tokens == 0
    idle(llm)


def test_73_nan_in_the_middle_of_an_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row's logits break at its sixth token; the same prompt asked again then gets its whole answer."""
    runner = runner_of(llm)
    llm.reset_prefix_cache()
    clean = [ids(output) for output in ask(llm, [prompt(*LONG), *MATES])]
    sample = runner.sampler.sample
    at = len(LONG) + 5

    def broken(logits_BV: torch.Tensor, rows: Any, lengths: Any, *rest: Any) -> Any:
        hit = [length == at for length in lengths]
        logits_BV = logits_BV.clone()
        logits_BV[torch.tensor(hit), 3] = float("nan")
        return sample(logits_BV, rows, lengths, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runner.sampler, "sample", broken)
        bad, *mates = ask(llm, [prompt(*LONG), *MATES])
    assert isinstance(bad.error, StepError)
    assert [ids(mate) for mate in mates] == clean[1:]
    (again,) = ask(llm, [prompt(*LONG)])
    assert ids(again) == clean[0]
    idle(llm)


def test_72_a_tower_without_memory_fails_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = runner_of(llm)._adapter
    llm.reset_prefix_cache()
    encode = adapter.encode
    fresh = [picture(11), picture(12), MATES[0], picture(13)]
    digest = llm._inputs.prepare(RequestOrder(fresh[1], GREEDY, request_id="x")).spans[0].item.digest

    def tight(items: Any) -> Any:
        if any(item.digest == digest for item in items):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return encode(items)

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "encode", tight)
        outputs = ask(llm, fresh)
    assert "out of memory" in str(outputs[1].error)
    clean = [ids(output) for output in ask(llm, fresh)]
    assert [ids(outputs[n]) for n in (0, 2, 3)] == [clean[n] for n in (0, 2, 3)]
    idle(llm)


@pytest.mark.parametrize("more", [-1, 1, -100])
def test_32_features_that_do_not_fit_their_places_fail_one_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """A tower gives one row more or less than the prompt has places, or none: that request fails, its mates do not
    notice, and when the tower is well again so is the picture."""
    adapter = runner_of(llm)._adapter
    llm.reset_prefix_cache()
    encode = adapter.encode
    fresh = [picture(3201 + more), picture(3401 + more), MATES[0], picture(3601 + more)]
    digest = llm._inputs.prepare(RequestOrder(fresh[1], GREEDY, request_id="x")).spans[0].item.digest

    def miscounted(items: Any) -> Any:
        rows = encode(items)
        for place, item in enumerate(items):
            if item.digest == digest:
                rows[place] = torch.cat([rows[place], rows[place]])[: max(0, len(rows[place]) + more)]
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "encode", miscounted)
        outputs = ask(llm, fresh)
    assert isinstance(outputs[1].error, StepError), outputs[1].error
    assert http_error(outputs[1].error).status == 500
    clean = [ids(output) for output in ask(llm, fresh)]
    assert [ids(outputs[n]) for n in (0, 2, 3)] == [clean[n] for n in (0, 2, 3)]
    idle(llm)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("no such kernel"),
        RuntimeError("CUDA error: invalid configuration argument"),
    ],
)
def test_a_batch_that_fails_is_run_one_by_one(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Too large together, or one of them at fault: whoever can be computed alone is."""
    runner = runner_of(llm)
    clean = [ids(output) for output in ask(llm, [*MATES, prompt(*LONG)])]
    llm.reset_prefix_cache()
    logits = runner._adapter.logits
    taken: list[weakref.ref[torch.Tensor]] = []

    def crowded(hidden_SH: torch.Tensor) -> Any:
        assert not any(ref() is not None for ref in taken), "the failed attempt still has its activations"
        if len(hidden_SH) > 1:
            activations = hidden_SH * 2
            taken.append(weakref.ref(activations))
            # As a library may: only the garbage collector would undo this knot.
            kept = type(error)(str(error))
            raise kept
        return logits(hidden_SH)

    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(runner._adapter, "logits", crowded)
            outputs = ask(llm, [*MATES, prompt(*LONG)])
    finally:
        gc.enable()
    assert taken
    assert [ids(output) for output in outputs] == clean
    assert llm.stats().retried > 0
    idle(llm)


@pytest.mark.parametrize("where", ["admitted", "encode"])
def test_whoever_fails_before_its_picture_is_encoded_spoils_it_for_nobody(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The scheduler counts on what a plan should have encoded; it is told what is not there."""
    runner = runner_of(llm)
    shown = picture(5100 + len(where))
    with monkeypatch.context() as patch:
        if where == "encode":

            def broken(items: Any) -> Any:
                if items:
                    raise RuntimeError("no event can be made")
                return ()

            patch.setattr(runner.encoder, "encode", broken)
        else:

            def full(*given: Any) -> None:
                raise RuntimeError("no row can be filled")

            patch.setattr(runner.sampler, "admit", full)
        (refused,) = ask(llm, [shown])
    assert refused.error is not None
    first, second = (ids(ask(llm, [shown])[0]) for _ in range(2))
    assert first == second
    idle(llm)


def test_a_result_that_is_lost_leaves_no_picture_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower fails in a step whose result cannot be read, which is where the failure would have been told."""
    runner = runner_of(llm)
    shown = picture(5200)
    collect, encode = runner.collect, runner._adapter.encode

    def tight(items: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def unread(handle: Any) -> Any:
        collect(handle)
        raise MemoryError("no memory on the host")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "collect", unread)
        patch.setattr(runner._adapter, "encode", tight)
        (failed,) = ask(llm, [shown])
    assert failed.error is not None
    assert runner._adapter.encode == encode
    assert ids(ask(llm, [shown])[0])
    idle(llm)


LOST = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


def fails_after(launch: Callable[[StepPlan], Any], count: int) -> Callable[[StepPlan], Any]:
    left = [count]

    def launched(plan: StepPlan) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError(LOST)
        return launch(plan)

    return launched


@pytest.mark.parametrize("overlap", [False, True])
def test_74_a_lost_device_ends_the_engine(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(
        str(tiny.checkpoint("llama")), dtype="float32", seed=0, max_model_len=128, async_scheduling=overlap
    ) as llm:
        runner = runner_of(llm)
        launch = runner.launch
        monkeypatch.setattr(runner, "launch", fails_after(launch, 3))
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            llm.generate(MATES, GREEDY, use_tqdm=False)
        monkeypatch.setattr(runner, "launch", launch)
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            llm.generate(MATES[0], GREEDY, use_tqdm=False)
        outputs = ask(llm, MATES)
        assert len(outputs) == 3
        assert all(isinstance(output.error, EngineDeadError) for output in outputs), "though the device seems well now"


def test_74_whoever_wants_errors_returned_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, max_model_len=128, max_num_seqs=2) as llm:
        runner = runner_of(llm)
        monkeypatch.setattr(runner, "launch", fails_after(runner.launch, 14))
        outputs = ask(llm, [*MATES, prompt(*LONG), prompt(*LONG)])
        assert [output.error is None for output in outputs[:2]] == [True, True], "they had ended before"
        assert all(isinstance(output.error, EngineDeadError) for output in outputs[2:])


def test_74_everyone_is_told_and_nobody_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask_one(llm: AsyncLLM, number: int) -> Any:
        try:
            async for output in llm.generate(MATES[number], GREEDY):
                last = output
            return last
        except EngineDeadError as error:
            return error

    async def run() -> None:
        async with AsyncLLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, max_model_len=128) as llm:
            runner = llm._engine._core.executor.runner  # type: ignore[attr-defined]
            monkeypatch.setattr(runner, "launch", fails_after(runner.launch, 5))
            found = await asyncio.wait_for(asyncio.gather(*(ask_one(llm, n) for n in range(3))), 20)
            assert all(isinstance(one, EngineDeadError) and "illegal memory access" in str(one) for one in found)
            answer = http_error(found[0])
            assert answer.status == 503
            assert not llm.alive
            with pytest.raises(EngineDeadError):
                await llm.ping()
            assert isinstance(await ask_one(llm, 0), EngineDeadError)

    asyncio.run(run())


def test_a_mistake_of_our_own_ends_the_engine_too() -> None:
    info, config = fake_info(), fake_config()
    core = EngineCore(info, FakeRunner(config, info, fake_capacity(info, config)))
    core.add(fake_request("a", [3, 4], max_tokens=4))

    def wrong(plan: StepPlan, result: StepResult, seconds: float | None = None) -> Any:
        raise AssertionError("a block was freed twice")

    core.scheduler.update = wrong  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="AssertionError"):
        core.step(None)
    assert not core.alive
    with pytest.raises(EngineDeadError):
        core.step(None)
    with pytest.raises(EngineDeadError):
        core.add(fake_request("b", [3, 4], max_tokens=4))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(LOST), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: invalid configuration argument\nCompile with"), False),
        (RuntimeError("CUDA error: too many resources requested for launch"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("a value"), False),
    ],
)
def test_which_errors_end_a_device(error: Exception, lost: bool) -> None:
    found = faults.loss_of(error, torch.device("cpu"))
    assert (found is not None) == lost
    assert found is None or "\n" not in found.reason


@pytest.mark.parametrize(
    ("error", "device", "emptied"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "cuda", [False]),
        (StepError("The image tower failed: CUDA out of memory."), "cuda", [False]),
        (RuntimeError("shapes"), "cuda", []),
        (torch.OutOfMemoryError("CUDA out of memory."), "cpu", []),
    ],
)
def test_the_device_s_cache_is_emptied_once_the_failed_step_has_let_go(
    error: Exception, device: str, emptied: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emptied before, it would hold all that the failed calls' variables still hold."""
    taken: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def step() -> None:
        activations = torch.zeros(64)
        taken.append(weakref.ref(activations))
        try:
            raise ValueError("the first reason")
        except ValueError as first:
            raise error from first

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(taken[0]() is not None))
    try:
        step()
    except Exception as caught:
        faults.let_go(caught, torch.device(device))
        assert taken[0]() is None
        assert alive == emptied
