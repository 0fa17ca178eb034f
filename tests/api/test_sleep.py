"""An engine that slept answers as before, token for token, and gave its memory back meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beheld import LLM, LoRARequest, SamplingParams
from beheld.api.async_llm import AsyncLLM
from beheld.compat.llm import ScriptLLM
from beheld.core.errors import AsleepError, CapacityError, ConfigError, EngineError, ParamsError, PausedError
from beheld.core.outputs import RequestOutput
from beheld.core.sleep import EnginePart
from beheld.core.structured_outputs import StructuredOutputs
from beheld.models.adapter import ModelAdapter
from beheld.runner import sleep as runner_sleep
from tests import tiny
from tests.lora import adapters
from tests.lora.adapters import Adapter

OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_num_seqs": 4, "num_gpu_blocks_override": 200}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, n=2, seed=5, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHARED = "the same words at the beginning of every prompt " * 6
PROMPTS = [f"{SHARED} {number}" for number in range(6)]


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def talk(number: int) -> list[dict[str, Any]]:
    pixels = np.random.default_rng(number).integers(0, 255, (56, 84, 3), dtype=np.uint8)
    image = {"type": "image_pil", "image_pil": Image.fromarray(pixels)}
    return [{"role": "user", "content": [image, {"type": "text", "text": f"what is {number}?"}]}]


def answers(llm: LLM) -> list[Any]:
    return [
        ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)),
        ids(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)),
        ids(llm.chat([talk(number) for number in range(3)], GREEDY, use_tqdm=False)),
    ]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny.checkpoint("qwen2_vl")), **OPTIONS) as made:
        yield made


def runner_of(llm: LLM) -> Any:
    return llm._live().core.executor.runner  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tags", [None, ("weights", "kv_cache"), ("kv_cache", "weights")])
def test_it_answers_as_before(llm: LLM, level: int, tags: tuple[str, ...] | None) -> None:
    before = answers(llm)
    assert llm.stats().scheduler.num_cached_blocks[0] > 0
    assert llm.stats().scheduler.num_embeds > 0
    llm.sleep(level)
    assert llm.is_sleeping()
    assert llm.stats().scheduler.num_cached_blocks == (0,)
    assert llm.stats().scheduler.num_embeds == 0
    with pytest.raises(AsleepError, match="wake_up"):
        llm.generate("x", GREEDY, use_tqdm=False)
    for tag in tags or ():
        assert llm.is_sleeping()
        llm.wake_up([tag])
    if tags is None:
        llm.wake_up()
    assert not llm.is_sleeping()
    hits = llm.stats().scheduler.prefix_hits
    assert answers(llm) == before
    assert llm.stats().scheduler.prefix_hits > hits, "prompts share their beginning again"


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back(llm: LLM, level: int) -> None:
    runner = runner_of(llm)
    kept, cache = weakref.ref(runner.adapter.model), [weakref.ref(each) for each in runner.kv.values()]
    gone = weakref.ref(runner)
    del runner
    llm.sleep(level)
    gc.collect()
    assert gone() is None
    assert [each() for each in cache] == [None] * len(cache)
    assert (kept() is None) == (level == 2)
    llm.wake_up()


def test_what_no_level_is_is_refused(llm: LLM) -> None:
    for wrong in (3, True, "1"):
        with pytest.raises(ParamsError, match="level"):
            llm.sleep(wrong)  # type: ignore[arg-type]
    with pytest.raises(ParamsError, match="mode"):
        llm.sleep(1, "gently")
    with pytest.raises(ParamsError, match="tags"):
        llm.wake_up(["weight"])
    assert not llm.is_sleeping()
    llm.wake_up()


def test_a_run_that_has_not_ended_goes_first(llm: LLM) -> None:
    stream = llm.generate_iter(PROMPTS, GREEDY)
    next(stream)
    with pytest.raises(EngineError, match="busy"):
        llm.sleep()
    stream.close()  # type: ignore[attr-defined]
    llm.sleep(0)
    with pytest.raises(AsleepError):
        llm.generate("x", GREEDY, use_tqdm=False)
    llm.wake_up(["scheduling"])
    assert llm.generate("x", GREEDY, use_tqdm=False)


def test_it_sleeps_on_where_memory_or_the_files_are_missing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers(llm)

    def refused(*_: Any, **__: Any) -> Any:
        raise CapacityError("Others have the memory.", "End them.")

    for name, lacks in (
        ("load", {EnginePart.WEIGHTS, EnginePart.KV_CACHE}),
        ("make_runner", {EnginePart.WEIGHTS, EnginePart.KV_CACHE}),
    ):
        llm.sleep(2)
        with monkeypatch.context() as patch:
            patch.setattr(runner_sleep, name, refused)
            with pytest.raises(CapacityError, match="Others"):
                llm.wake_up()
            assert llm._live().engine.lacks >= lacks
        llm.wake_up()
        assert answers(llm) == before


def test_what_a_failed_attempt_took_is_given_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers(llm)
    taken: list[weakref.ref[Any]] = []

    def refused(adapter: Any, *_: Any) -> Any:
        taken.append(weakref.ref(adapter))
        raise CapacityError("Others have the memory.", "End them.")

    llm.sleep(2)
    llm.wake_up(["kv_cache"])
    with monkeypatch.context() as patch:
        patch.setattr(runner_sleep, "make_runner", refused)
        for _ in range(2):
            # A second attempt that found nothing to do would leave an engine that believes itself awake.
            with pytest.raises(CapacityError, match="Others") as told:
                llm.wake_up(["weights"])
            assert told.value is not None
            assert taken[-1]() is None
            assert llm._live().engine.lacks == {EnginePart.WEIGHTS, EnginePart.SCHEDULING}
    llm.wake_up(["weights"])
    assert not llm.is_sleeping()
    assert answers(llm) == before


def test_a_deeper_sleep_gives_back_the_weights(llm: LLM) -> None:
    before = answers(llm)
    weights = weakref.ref(runner_of(llm).adapter)
    llm.sleep(1)
    assert weights() is not None
    llm.sleep(2)
    assert weights() is None
    llm.wake_up(["weights"])
    # As a trainer that changes its mind does.
    llm.sleep(2)
    llm.wake_up(["kv_cache"])
    assert llm._live().engine.lacks == {EnginePart.WEIGHTS, EnginePart.SCHEDULING}
    llm.wake_up()
    assert answers(llm) == before


def test_no_grammar_is_followed_any_more(llm: LLM) -> None:
    chosen = SamplingParams(temperature=0.0, max_tokens=10, structured_outputs=StructuredOutputs(choice=["ab"]))
    (before,) = ids(llm.generate("x", chosen, use_tqdm=False))
    grammars = llm._live().core.grammars
    assert grammars is not None
    assert grammars._states
    llm.sleep(1)
    assert not grammars._states
    llm.wake_up()
    assert ids(llm.generate("x", chosen, use_tqdm=False)) == [before]


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_those_of_before(level: int, tmp_path: Path) -> None:
    folders = [adapters.write(Adapter("llama", n, 2, "q_proj|v_proj"), tmp_path / str(n)) for n in range(2)]
    loras = [LoRARequest(f"lora{n}", n + 1, folder) for n, folder in enumerate(folders)]
    with LLM(str(tiny.checkpoint("llama")), **OPTIONS, **LORA, enable_sleep_mode=True) as llm:
        asked = [None, loras[0], loras[1], loras[0]]
        before = ids(llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False, lora_request=asked))
        assert len({str(each) for each in before}) == 4
        llm.pin_lora(2)
        llm.sleep(level)
        assert llm.list_loras() == {1, 2}
        with pytest.raises(AsleepError):
            llm.remove_lora(1)
        llm.wake_up()
        assert llm.list_loras() == {1, 2}
        assert runner_of(llm).adapter.lora.pinned == {2}
        assert ids(llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False, lora_request=asked)) == before


def test_an_adapter_whose_folder_is_gone_is_told_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = [adapters.write(Adapter("llama", n, 2, "q_proj|v_proj"), tmp_path / str(n)) for n in range(2)]
    with LLM(str(tiny.checkpoint("llama")), **OPTIONS, **LORA) as llm:
        for n, folder in enumerate(folders):
            llm.add_lora(LoRARequest(f"lora{n}", n + 1, folder))
        llm.sleep(2)
        (Path(folders[0]) / "adapter_model.safetensors").unlink()
        llm.wake_up()
        assert "lora0" in caplog.text
        assert llm.list_loras() == {2}


def test_a_pooling_model_sleeps() -> None:
    with LLM(str(tiny.checkpoint("qwen2_vl")), runner="pooling", convert="embed", **OPTIONS) as llm:
        before = [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
        llm.sleep(2)
        llm.wake_up()
        assert [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)] == before


def test_weights_are_read_again_as_scripts_ask_for_it() -> None:
    llm = ScriptLLM(str(tiny.checkpoint("llama")), **OPTIONS)
    before = ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    for _ in range(2):
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        assert llm.collective_rpc("reload_weights") == [None]
        llm.wake_up(tags=["kv_cache"])
        assert not llm.is_sleeping()
        assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == before
    llm.sleep(level=2)
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "safetensors"}},))
    assert llm.collective_rpc("reload_weights") == [None]
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == before
    llm.close()


def test_an_engine_that_a_script_steps_sleeps() -> None:
    engine = ScriptLLM(str(tiny.checkpoint("llama")), **OPTIONS).llm_engine
    engine.add_request("a", "hello", LONG)
    engine.step()
    with pytest.raises(ParamsError, match="has_unfinished_requests"):
        engine.sleep(1, "keep")
    with pytest.raises(ParamsError, match="level"):
        engine.sleep(3)
    assert engine.has_unfinished_requests()
    engine.sleep()
    assert (engine.is_sleeping(), engine.has_unfinished_requests()) == (True, False)
    with pytest.raises(AsleepError):
        engine.add_request("b", "hello", GREEDY)
    engine.wake_up()
    engine.add_request("b", "hello", GREEDY)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert len(outputs[0].outputs[0].token_ids) == 10
    engine.close()


async def told(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> RequestOutput:
    found = [output async for output in llm.generate(prompt, params, pieces="final")]
    return found[-1]


@contextlib.asynccontextmanager
async def serving(engine: str, **options: Any) -> Any:
    made = await asyncio.to_thread(
        AsyncLLM, str(tiny.checkpoint("llama")), engine=engine, **OPTIONS | {"max_model_len": 512}, **options
    )
    async with made as llm:
        yield llm


async def begun(llm: AsyncLLM, prompt: str) -> asyncio.Task[RequestOutput]:
    """A long answer with its first token."""
    first = asyncio.Event()

    async def whole() -> RequestOutput:
        outputs: list[RequestOutput] = []
        async for output in llm.generate(prompt, LONG, pieces="cumulative"):
            outputs = [output]
            first.set()
        return outputs[0]

    task = asyncio.create_task(whole())
    await first.wait()
    return task


@pytest.mark.parametrize("level", [0, 1, 2])
def test_modes_of_a_served_engine(level: int) -> None:
    async def run() -> None:
        async with serving("thread") as llm:
            whole = list((await told(llm, PROMPTS[0], LONG)).outputs[0].token_ids)

            task = await begun(llm, PROMPTS[0])
            await llm.sleep(level)
            ended = (await task).outputs[0]
            assert ended.finish_reason == "abort"
            assert list(ended.token_ids) == whole[: len(ended.token_ids)]
            await llm.wake_up()

            task = await begun(llm, PROMPTS[0])
            await llm.sleep(level, "wait")
            assert task.done() or list((await task).outputs[0].token_ids) == whole
            assert (await llm.ping()).scheduler.num_running == 0
            await llm.wake_up()

            task = await begun(llm, PROMPTS[0])
            await llm.sleep(level, "keep")
            steps = (await llm.ping()).steps
            await asyncio.sleep(0.1)
            assert not task.done()
            assert (await llm.ping()).steps == steps
            await llm.wake_up()
            assert list((await task).outputs[0].token_ids) == whole

    asyncio.run(run())


def test_where_ranks_share_the_model_requests_go_on_after_the_refusal() -> None:
    async def check() -> None:
        options = OPTIONS | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        with contextlib.closing(AsyncLLM(str(tiny.checkpoint("llama")), **options)) as llm:
            begun = asyncio.Event()

            async def answer() -> RequestOutput:
                outputs = llm.generate("hello", LONG)
                first = await anext(outputs)
                begun.set()
                return [first, *[output async for output in outputs]][-1]

            task = asyncio.create_task(answer())
            await begun.wait()
            for mode in ("abort", "wait", "keep"):
                with pytest.raises(ConfigError, match="ranks"):
                    await llm.sleep(2, mode)
            assert not await llm.is_sleeping()
            await llm.pause_generation(mode="keep")
            assert await llm.is_paused()
            await llm.resume_generation()
            output = await task
            assert len(output.outputs[0].token_ids) == 400

    asyncio.run(check())


def test_requests_wait_for_a_paused_engine_and_are_refused_by_a_sleeping_one() -> None:
    async def run() -> None:
        async with serving("thread") as llm:
            wanted = (await told(llm, PROMPTS[0])).outputs[0].token_ids
            await llm.pause_generation(mode="keep")
            assert await llm.is_paused()
            task = asyncio.create_task(told(llm, PROMPTS[0]))
            await asyncio.sleep(0.1)
            assert not task.done()
            await llm.sleep(1, "keep")
            with pytest.raises(AsleepError):
                await told(llm, PROMPTS[0])
            await llm.resume_generation()
            assert await llm.is_sleeping(), "steps alone do not wake it up"
            await llm.wake_up(["weights", "kv_cache"])
            assert not await llm.is_sleeping()
            assert (await task).outputs[0].token_ids == wanted

    asyncio.run(run())


@pytest.mark.parametrize(
    ("engine", "options"), [("thread", {}), ("process", {}), ("process", {"data_parallel_size": 2})]
)
def test_a_pause_refuses_requests_unless_it_keeps_them(engine: str, options: dict[str, int]) -> None:
    async def run() -> None:
        async with serving(engine, **options) as llm:
            wanted = (await told(llm, PROMPTS[0])).outputs[0].token_ids
            for mode in ("abort", "wait"):
                task = await begun(llm, PROMPTS[1])
                pausing = asyncio.create_task(llm.pause_generation(mode=mode))
                await asyncio.sleep(0)
                with pytest.raises(PausedError, match="/resume"):
                    await told(llm, PROMPTS[0])
                await pausing
                assert (await task).outputs[0].finish_reason == ("abort" if mode == "abort" else "length")
                # Weights that change in a pause change nothing of it.
                await llm.reload_weights()
                with pytest.raises(PausedError):
                    await told(llm, PROMPTS[0])
                await llm.resume_generation()
                assert (await told(llm, PROMPTS[0])).outputs[0].token_ids == wanted
            await llm.pause_generation()
            # The last pause says it, and one by the name of a sleep leaves it.
            await llm.sleep(0, "keep")
            with pytest.raises(PausedError):
                await told(llm, PROMPTS[0])
            await llm.pause_generation(mode="keep")
            task = asyncio.create_task(told(llm, PROMPTS[0]))
            await asyncio.sleep(0.1)
            assert not task.done()
            await llm.resume_generation()
            assert (await task).outputs[0].token_ids == wanted

    asyncio.run(run())


def test_a_pause_that_is_called_off_refuses_no_more() -> None:
    async def run() -> None:
        async with serving("thread") as llm:
            task = await begun(llm, PROMPTS[0])
            pausing = asyncio.create_task(llm.pause_generation(mode="wait"))
            await asyncio.sleep(0)
            await llm.resume_generation()
            with pytest.raises(EngineError, match="woken up before"):
                await pausing
            assert (await told(llm, PROMPTS[1])).finished
            assert (await task).outputs[0].finish_reason == "length"

    asyncio.run(run())


def test_weights_that_are_read_again_leave_a_trainer_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ModelAdapter] = []
    make = runner_sleep.make_runner

    def noted(adapter: ModelAdapter, *rest: Any) -> Any:
        made.append(adapter)
        return make(adapter, *rest)

    monkeypatch.setattr(runner_sleep, "make_runner", noted)

    async def run() -> None:
        async with serving("thread") as llm:
            wanted = (await told(llm, PROMPTS[0])).outputs[0].token_ids
            await llm.sleep(2)
            await llm.wake_up(["weights"])
            await llm.reload_weights()
            assert not made, "the cache is allocated, although the trainer has not given its memory back"
            assert await llm.is_sleeping()
            await llm.wake_up(["kv_cache"])
            assert len(made) == 1
            assert (await told(llm, PROMPTS[0])).outputs[0].token_ids == wanted

    asyncio.run(run())


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_paused_engine_computes_no_step_while_weights_change(engine: str) -> None:
    async def run() -> None:
        async with serving(engine) as llm:
            whole = list((await told(llm, PROMPTS[0], LONG)).outputs[0].token_ids)
            task = await begun(llm, PROMPTS[0])
            await llm.pause_generation(mode="keep")
            steps = (await llm.ping()).steps

            async def busy() -> None:
                """Other work of the front, which takes its time before it reads what the engine says."""
                while True:
                    time.sleep(0.05)
                    await asyncio.sleep(0)

            working = asyncio.create_task(busy())
            await llm.reset_weights()
            await llm.reload_weights()
            working.cancel()
            assert (await llm.ping()).steps == steps
            assert await llm.is_paused()
            await llm.resume_generation()
            assert list((await task).outputs[0].token_ids) == whole

    asyncio.run(run())


@pytest.mark.parametrize("change", [AsyncLLM.reset_weights, AsyncLLM.reload_weights])
def test_an_operator_pauses_and_resumes_while_weights_change(change: Any) -> None:
    async def run() -> None:
        async with serving("thread") as llm:
            for paused in (True, False):
                running = [asyncio.create_task(change(llm)) for _ in range(2)]
                await asyncio.sleep(0)
                await (llm.pause_generation() if paused else llm.resume_generation())
                await asyncio.gather(*running)
                assert await llm.is_paused() == paused
            await llm.reload_weights()
            assert (await told(llm, PROMPTS[0])).finished

    asyncio.run(run())


def test_requests_wait_while_weights_are_read_again() -> None:
    async def run() -> None:
        async with serving("thread") as llm:
            wanted = (await told(llm, PROMPTS[0])).outputs[0].token_ids
            reading = asyncio.create_task(llm.reload_weights())
            await asyncio.sleep(0)
            assert (await told(llm, PROMPTS[0])).outputs[0].token_ids == wanted
            await reading

    asyncio.run(run())


def test_a_request_that_comes_while_others_end_first_is_refused() -> None:
    async def run() -> None:
        async with serving("thread") as llm:
            task = await begun(llm, PROMPTS[0])
            falling = asyncio.create_task(llm.sleep(1, "wait"))
            await asyncio.sleep(0)
            with pytest.raises(AsleepError):
                await told(llm, PROMPTS[1])
            await falling
            assert (await task).outputs[0].finish_reason == "length"

    asyncio.run(run())


@pytest.mark.parametrize("num_engines", [1, 2])
def test_engines_in_processes_sleep(num_engines: int) -> None:
    async def run() -> None:
        async with serving("process", data_parallel_size=num_engines) as llm:
            wanted = [(await told(llm, prompt)).outputs[0].token_ids for prompt in PROMPTS]
            for level in (1, 2):
                await llm.sleep(level)
                stats = await llm.ping()
                assert stats.scheduler.num_cached_blocks == (0,)
                with pytest.raises(AsleepError):
                    await told(llm, PROMPTS[0])
                await llm.wake_up()
                found = await asyncio.gather(*(told(llm, prompt) for prompt in PROMPTS))
                assert [each.outputs[0].token_ids for each in found] == wanted

    asyncio.run(run())


def test_offline_engines_in_processes_sleep() -> None:
    with LLM(str(tiny.checkpoint("llama")), data_parallel_size=2, **OPTIONS) as llm:
        before = ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        llm.sleep(2)
        assert llm.is_sleeping()
        with pytest.raises(AsleepError):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.wake_up()
        assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == before
