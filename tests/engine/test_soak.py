"""Long runs with aborts, failures and tiny caches: every answer is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from typing import Any

import pytest

from beheld import LLM, AsyncLLM, SamplingParams
from beheld.core.errors import BeheldError
from beheld.core.request import Request
from beheld.engine.core import EngineCore, InFlight
from tests import tiny
from tests.fakes import (
    FakeRunner,
    expected_tokens,
    fake_capacity,
    fake_config,
    fake_info,
    fake_item,
    fake_request,
)
from tests.long import sized


@pytest.mark.parametrize("overlap", [False, True])
def test_10000_requests_with_random_aborts_leave_nothing(overlap: bool) -> None:
    """The short form has 1,000. Items fail, rows break, requests are aborted or stopped at any time."""
    many, chance = sized(1_000, 10_000), random.Random(7)
    info = fake_info()
    config = fake_config(overlap=overlap, max_encoder_tokens=40)
    runner = FakeRunner(config, info, fake_capacity(info, config, 120), verify=False)
    core = EngineCore(info, runner)
    pictures = [fake_item(f"picture {n}", 5 + n % 7) for n in range(20)]
    runner.broken_digests.add(pictures[3].digest)
    live: dict[str, Request] = {}
    told: dict[str, list[int]] = {}
    number, finished = 0, 0
    in_flight: InFlight | None = None
    while number < many or core.scheduler.has_work or in_flight is not None:
        while number < many and len(live) < 30:
            parts: list[Any] = [[chance.randrange(3, 80) for _ in range(chance.randrange(1, 30))]]
            parts += [chance.choice(pictures)] if chance.random() < 0.4 else []
            request = fake_request(f"r{number}", *parts, chance.randrange(3, 80), max_tokens=chance.randrange(1, 12))
            core.add(request)
            live[request.id], told[request.id] = request, []
            number += 1
        for name in [n for n in live if chance.random() < 0.02]:
            if chance.random() < 0.5:
                assert core.scheduler.abort(name) is not None
            else:
                core.scheduler.stop(name)
            del live[name]
        in_flight, events = core.step(in_flight)
        for event in events:
            request = live.get(event.request_id)
            if request is None:
                continue
            told[event.request_id] += event.token_ids
            if event.finish is not None:
                del live[event.request_id]
                finished += 1
                if event.error is None:
                    assert told[event.request_id] == expected_tokens(request, 256)[0]
        if chance.random() < 0.01:
            core.scheduler.clear_prefix_cache()
            core.scheduler.check()
    core.scheduler.check()
    stats = core.stats().scheduler
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert not core.scheduler._flights
    assert finished > many / 2


def test_59_caches_that_hold_almost_nothing_never_show() -> None:
    """Twenty pictures over caches for two, with bad items, early ends and clears: each answer is its own."""
    steps, chance = sized(40, 1_000), random.Random(3)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    family = "qwen2_vl"

    def prompt(*seeds: int) -> dict[str, Any]:
        pictures = [b"bad" if seed < 0 else tiny.picture(56 + 28 * (seed % 2), 56, seed) for seed in seeds]
        return {"prompt": tiny.prompt(family, len(seeds), 0, "Hi?"), "multi_modal_data": {"image": pictures}}

    def tokens(llm: LLM, *seeds: int) -> tuple[int, ...]:
        return tuple(llm.generate(prompt(*seeds), params, use_tqdm=False)[0].outputs[0].token_ids)

    common = {"dtype": "float32", "seed": 0, "max_model_len": 128, "media_workers": 0}
    with LLM(str(tiny.checkpoint(family)), **common) as roomy:
        right = {seed: tokens(roomy, seed) for seed in range(20)}
    bound = 100_000
    with LLM(
        str(tiny.checkpoint(family)),
        mm_processor_cache_gb=bound / 2**30,
        mm_encoder_budget=16,
        num_gpu_blocks_override=20,
        max_num_seqs=4,
        **common,
    ) as llm:
        for _ in range(steps):
            seeds = [chance.choice((-1, *range(20))) for _ in range(chance.randrange(1, 6))]
            act = chance.random()
            if act < 0.1:
                llm.reset_prefix_cache()
            elif act < 0.2:
                llm._inputs.cache.clear()
            elif act < 0.35:
                next(llm.generate_iter([prompt(seed) for seed in seeds], params))
                continue
            outputs = llm.generate([prompt(seed) for seed in seeds], params, use_tqdm=False, on_error="return")
            for seed, output in zip(seeds, outputs, strict=True):
                if seed < 0:
                    assert output.error is not None
                else:
                    assert output.error is None, output.error
                    assert tuple(output.outputs[0].token_ids) == right[seed]
            stats = llm._inputs.cache.stats()
            assert stats.num_bytes <= stats.max_bytes <= bound
        assert stats.evictions > 0
        assert llm._run is not None
        llm._run.core.scheduler.check()
        left = llm._run.core.scheduler.stats()
        assert left.num_free_blocks == left.num_blocks


def test_61_clients_that_go_away_leave_nothing() -> None:
    """Cancelled before, while and after they are computed; 10,000 in the long form, 200 in the short."""
    many, chance = sized(200, 10_000), random.Random(11)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    async def one(llm: AsyncLLM, number: int, right: tuple[int, ...]) -> bool:
        after = chance.choice((0, 1, 2, 4, 99))
        answers = llm.generate({"prompt_token_ids": [5 + number % 3, 6, 7]}, params)
        count = 0
        try:
            async for output in answers:
                count += 1
                last = output
                if count > after:
                    return False
        except BeheldError:
            return False
        finally:
            await answers.aclose()
        return number % 3 != 0 or tuple(last.outputs[0].token_ids) == right

    async def run() -> None:
        async with AsyncLLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, max_model_len=64) as llm:
            async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params):
                right = tuple(output.outputs[0].token_ids)
            before = len(os.listdir("/proc/self/fd")), threading.active_count()
            done = 0
            for first in range(0, many, 20):
                tasks = [asyncio.ensure_future(one(llm, n, right)) for n in range(first, first + 20)]
                await asyncio.sleep(chance.random() * 0.01)
                for task in chance.sample(tasks, 6):
                    task.cancel()
                for answer in await asyncio.gather(*tasks, return_exceptions=True):
                    assert isinstance(answer, bool | asyncio.CancelledError), answer
                    done += answer is True
            assert done > 0
            for _ in range(100):
                stats = (await llm.ping()).scheduler
                if (stats.num_running, stats.num_waiting) == (0, 0):
                    break
                await asyncio.sleep(0.01)
            assert (stats.num_running, stats.num_waiting, llm.num_live) == (0, 0, 0)
            assert stats.num_free_blocks == stats.num_blocks
            gc.collect()
            assert len(os.listdir("/proc/self/fd")) <= before[0] + 2
            assert threading.active_count() <= before[1] + 16

    asyncio.run(run())
