"""The metrics of a request say how often its answers were interrupted for others."""

from __future__ import annotations

import asyncio

import pytest

from beheld import AsyncLLM, SamplingParams
from beheld.core.outputs import RequestOutput
from tests import tiny


@pytest.mark.parametrize(("n", "engine"), [(1, "thread"), (2, "thread"), (1, "process")])
def test_a_requests_interruptions_are_counted(n: int, engine: str) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.5, seed=0, n=n)

    async def answer(llm: AsyncLLM, name: str) -> RequestOutput:
        last = None
        async for output in llm.generate("A small cat", params, name):
            assert last is None or last.metrics is None or last.metrics.num_preemptions == 0
            last = output
        assert last is not None
        return last

    async def run() -> None:
        # Blocks for less than two answers of those that there are.
        llm = AsyncLLM(
            model=str(tiny.checkpoint("llama")),
            dtype="float32",
            max_model_len=128,
            num_gpu_blocks_override=10,
            block_size=16,
            disable_log_stats=True,
            engine=engine,
        )
        try:
            outputs = await asyncio.gather(*(answer(llm, str(number)) for number in range(2)))
            counts = [output.metrics.num_preemptions for output in outputs if output.metrics is not None]
            stats = await llm.ping()
            assert len(counts) == 2
            assert sum(counts) == stats.scheduler.num_preemptions > 0
        finally:
            llm.close()

    asyncio.run(run())
