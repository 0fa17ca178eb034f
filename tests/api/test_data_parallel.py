"""Two engines in processes answer as one does; what dies takes only what it had begun with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beheld import LLM, SamplingParams
from beheld.api.async_llm import AsyncLLM
from beheld.core.errors import BeheldError, EngineDeadError, LoRAError, ModelError, ParamsError
from beheld.core.outputs import RequestOutput
from beheld.core.request import LoRARequest
from beheld.core.structured_outputs import StructuredOutputs
from beheld.engine.data_parallel import DataParallelEngines
from beheld.engine.stats import EngineState, EngineStats
from tests import ranks as forking
from tests import tiny
from tests.long import LONG, sized
from tests.lora import adapters

OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_num_seqs": 8, "num_gpu_blocks_override": 400}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, n=2, seed=5, max_tokens=12, ignore_eos=True)
CHOICE = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputs(choice=["ab", "cd"]))


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (56, 84, 3), dtype=np.uint8))


def conversation(number: int, image: int) -> list[dict[str, Any]]:
    content = [{"type": "image_pil", "image_pil": picture(image)}, {"type": "text", "text": f"what is {number}?"}]
    return [{"role": "user", "content": content}]


PROMPTS = [f"question {number}" for number in range(16)]
TALKS = [conversation(number, number % 5) for number in range(25)]


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one engine answers."""
    with LLM(str(tiny.checkpoint("qwen2_vl")), **OPTIONS) as llm:
        return {
            "prompts": ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)),
            "sampled": ids(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)),
            "talks": ids(llm.chat(TALKS, GREEDY, use_tqdm=False)),
            "choice": [output.outputs[0].text for output in llm.generate(PROMPTS[:4], CHOICE, use_tqdm=False)],
        }


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM(str(tiny.checkpoint("qwen2_vl")), data_parallel_size=2, **OPTIONS) as llm:
        yield llm


def test_two_engines_answer_like_one(two: LLM, alone: dict[str, Any]) -> None:
    assert ids(two.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone["prompts"]
    assert ids(two.generate(PROMPTS, SAMPLED, use_tqdm=False)) == alone["sampled"]
    assert ids(two.chat(TALKS, GREEDY, use_tqdm=False)) == alone["talks"]
    assert [output.outputs[0].text for output in two.generate(PROMPTS[:4], CHOICE, use_tqdm=False)] == alone["choice"]
    stats = two.stats()
    assert stats.routing is not None
    assert stats.routing.num_repeated >= 20
    assert stats.routing.num_found >= 0.95 * stats.routing.num_repeated
    assert all(report.stats is not None and report.stats.steps > 10 for report in stats.engines)
    assert stats.scheduler.num_encoded <= 6


def test_repeated_images_are_encoded_once_in_all(two: LLM) -> None:
    before = two.stats().scheduler.num_encoded
    found = two.chat([conversation(number, 100 + number % 4) for number in range(40)], GREEDY, use_tqdm=False)
    assert two.stats().scheduler.num_encoded - before <= 5
    # The one front prepares each of the four once, whichever engine answers.
    assert sum(not receipt.cached for output in found for receipt in output.media) == 4


def test_offline_calls_act_on_all_engines(two: LLM) -> None:
    shared = "the same words at the beginning of every prompt " * 10
    two.generate([shared + str(number) for number in range(8)], GREEDY, use_tqdm=False)
    assert two.stats().scheduler.num_cached_blocks[0] > 0
    assert two.reset_prefix_cache()
    assert two.stats().scheduler.num_cached_blocks == (0,)
    with pytest.raises(LoRAError, match="takes no LoRA adapters"):
        two.remove_lora(3)
    with pytest.raises(LoRAError, match="takes no LoRA adapters"):
        two.add_lora(LoRARequest("style", 3, "/style"))
    assert two.stats().steps > 0


def test_error_of_one_prompt_is_its_own(two: LLM, alone: dict[str, Any]) -> None:
    mixed: list[Any] = [PROMPTS[0], {"prompt_token_ids": []}, PROMPTS[1]]
    outputs = two.generate(mixed, GREEDY, use_tqdm=False, on_error="return")
    assert isinstance(outputs[1].error, BeheldError)
    assert [ids([outputs[0]])[0], ids([outputs[2]])[0]] == alone["prompts"][:2]
    stream = two.generate_iter(PROMPTS, GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert ids(two.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone["prompts"]
    assert two.stats().engines[0].num_requests == 0


@pytest.mark.skipif(not LONG, reason="starts two processes; BEHELD_LONG=1 runs it")
def test_error_at_the_start_leaves_no_process() -> None:
    with pytest.raises(ModelError):
        LLM("/nonexistent/model", data_parallel_size=2)


def pids(llm: AsyncLLM) -> list[int]:
    engines = llm._engine
    assert isinstance(engines, DataParallelEngines)
    return [member.engine.pid for member in engines._members if member.engine is not None]  # type: ignore[attr-defined]


def ranks_of(pid: int) -> list[int]:
    """The processes of an engine's other ranks."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text(encoding="ascii").split()):
            if b"beheld.executor.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


async def answer(llm: AsyncLLM, talk: list[dict[str, Any]], delta: bool) -> list[int] | BeheldError:
    """The token ids of an answer, or its error."""
    found: list[int] = []
    try:
        async for output in llm.chat(talk, GREEDY, pieces="delta" if delta else "final"):
            found += output.outputs[0].token_ids
    except BeheldError as error:
        return error
    return found


async def all_serve(llm: AsyncLLM, within_s: float = 60.0) -> EngineStats:
    deadline = time.monotonic() + within_s
    while True:
        stats = await llm.ping()
        if all(report.state is EngineState.SERVING and report.stats is not None for report in stats.engines):
            return stats
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.skipif(not LONG, reason="tests/server/test_data_parallel.py kills one; BEHELD_LONG=1 kills 260")
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_engine_is_replaced_and_no_answer_is_lost_or_crossed(
    alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """A process is killed while 25 requests run, at a random moment; a new one takes its place. Again and again.

    With engines of two ranks, the process is any rank of any engine. Engines of one are forked, so that a new one takes
    tenths of a second.
    """
    # Replaced without a growing wait.
    monkeypatch.setattr("beheld.engine.data_parallel._LONG_LIFE_S", 0.0)
    draw = random.Random(int(os.environ.get("BEHELD_SEED", "1")))
    kills = sized(1, 200 if ranks == 1 else 60)
    options = OPTIONS | {"data_parallel_size": 2, "tensor_parallel_size": ranks}
    if ranks > 1:
        options |= {"device": "cpu", "distributed_executor_backend": "mp"}

    async def ask() -> tuple[int, int]:
        failed = 0
        async with AsyncLLM(str(tiny.checkpoint("qwen2_vl")), **options) as llm:
            for number in range(kills):
                assert len(set(pids(llm))) == 2
                processes = [each for pid in pids(llm) for each in (pid, *ranks_of(pid))]
                assert len(processes) == 2 * ranks
                tasks = [asyncio.create_task(answer(llm, talk, draw.random() < 0.5)) for talk in TALKS]
                await asyncio.sleep(draw.random() * 0.6)
                os.kill(draw.choice(processes), signal.SIGKILL)
                found = await asyncio.wait_for(asyncio.gather(*tasks), 60)
                for got, (expected,) in zip(found, alone["talks"], strict=True):
                    failed += isinstance(got, BeheldError)
                    assert isinstance(got, BeheldError) or got == expected
                # Until a rank is noticed, its engine still counts as serving.
                until = time.monotonic() + 60.0
                while sum(report.restarts for report in llm.engine_reports()) <= number:
                    assert time.monotonic() < until
                    await asyncio.sleep(0.05)
                stats = await all_serve(llm)
                again = await asyncio.gather(*(answer(llm, talk, True) for talk in TALKS))
                assert list(again) == [expected for (expected,) in alone["talks"]]
                print(f"kill {number + 1}: {failed} failed so far", flush=True)
            assert sum(report.restarts for report in stats.engines) == kills
            assert stats.routing is not None
            assert (stats.routing.num_lost, llm.num_live) == (failed, 0)
            return failed, stats.routing.num_retried

    with forking.forked_engines() if ranks == 1 else contextlib.nullcontext():
        failed, moved = asyncio.run(ask())
    print(f"{kills} kills: {failed} requests failed, {moved} moved, of {kills * len(TALKS)}")
    assert failed
    assert moved


@pytest.mark.skipif(not LONG, reason="starts two processes; BEHELD_LONG=1 runs it")
def test_death_of_all_is_told_soon() -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny.checkpoint("llama")), data_parallel_size=2, **OPTIONS) as llm:
            stream = llm.generate("go on", SamplingParams(max_tokens=1500, ignore_eos=True), pieces="delta")
            await anext(stream)
            with pytest.raises(ParamsError):
                await anext(llm.generate("x", GREEDY, "0"))
            begin, processes = time.monotonic(), pids(llm)
            for pid in processes:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(BeheldError):
                async for _ in stream:
                    pass
            while llm.alive:
                await asyncio.sleep(0.01)
                assert time.monotonic() - begin < 5.0
            with pytest.raises(EngineDeadError):
                await llm.ping()
        for pid in processes:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(ask())


@pytest.mark.skipif(not LONG, reason="starts four processes; BEHELD_LONG=1 runs it")
def test_adapters_are_on_all_engines(tmp_path: Path) -> None:
    lora = LoRARequest("blue", 1, adapters.write(adapters.Adapter("llama", 1, 2, "q_proj|v_proj"), tmp_path))
    options = {**OPTIONS, "enable_lora": True, "max_lora_rank": 4}
    with LLM(str(tiny.checkpoint("llama")), **options) as llm:
        expected = ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=lora))
        assert expected != ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    with LLM(str(tiny.checkpoint("llama")), data_parallel_size=2, **options) as llm:
        assert llm.add_lora(lora)
        assert llm.list_loras() == {1}
        assert llm.pin_lora(1)
        assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=lora)) == expected
        with pytest.raises(LoRAError):
            llm.add_lora(LoRARequest("red", 2, "/nonexistent"))
        assert llm.remove_lora(1)
        assert not llm.remove_lora(1)
        assert llm.list_loras() == set()
