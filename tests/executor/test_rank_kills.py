"""A rank that is killed at a random step offline: no hang, nothing lost or doubled, one error that names it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from beheld import SamplingParams
from beheld.core.errors import EngineDeadError
from beheld.executor.multi import MultiExecutor
from tests import ranks, tiny
from tests.long import LONG, sized
from tests.oracle import cases
from tests.oracle.test_oracle import make

RANKS: dict[str, Any] = {"device": "cpu", "distributed_executor_backend": "mp"}
SPLITS: tuple[dict[str, Any], ...] = (
    {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
)  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LIMIT_S = 10.0


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Ranks start quickly."""
    with ranks.forked():
        yield


@pytest.mark.skipif(not LONG, reason="starts engines, which takes seconds each; test_ranks.py kills a rank of two")
@pytest.mark.parametrize(
    "split", SPLITS, ids=lambda split: "-".join(f"{name[:6]}{size}" for name, size in split.items())
)
def test_a_rank_that_is_killed_at_any_step(quick: None, split: dict[str, Any]) -> None:
    """Each time another rank and another moment, of prompts that are cut, too."""
    draw = random.Random(f"{split} {os.environ.get('BEHELD_SEED', '1')}")
    prompts = [tiny.wrap("llama", f"Request {number}. " * (1 + 5 * (number % 3))) for number in range(6)]
    options = cases.options("llama", "cut")
    with make("llama", options | {"device": "cpu"}) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    took_s, hit = 0.0, 0
    kills = sized(1, 67)
    for _ in range(kills):
        with make("llama", options | RANKS | split) as llm:
            executor: Any = llm._live().core.executor
            assert isinstance(executor, MultiExecutor)
            begun = time.monotonic()
            if not took_s:
                llm.generate(prompts, PARAMS, use_tqdm=False)
                took_s = time.monotonic() - begun
            victim: Any = draw.choice(executor._ranks)
            killed: list[float] = []

            def kill(pid: int = victim.process.pid, killed: list[float] = killed) -> None:
                os.kill(pid, signal.SIGKILL)
                killed.append(time.monotonic())

            timer = threading.Timer(draw.random() * took_s, kill)
            timer.start()
            found = llm.generate(prompts, PARAMS, use_tqdm=False, on_error="return")
            ended = time.monotonic()
            timer.join()
            assert ended - killed[0] < LIMIT_S
            failed = [output for output in found if output.error is not None]
            hit += bool(failed)
            assert all(isinstance(output.error, EngineDeadError) for output in failed)
            assert all(f"rank {victim.rank} " in str(output.error) for output in failed), failed[0].error
            for output, whole in zip(found, wanted, strict=True):
                tokens = [token for answer in output.outputs for token in answer.token_ids]
                assert tokens == whole[: len(tokens)] if output.error is not None else tokens == whole
            # The watchdog notices a rank that was killed after the last answer, too.
            told = threading.Event()
            executor.on_loss(told.set)
            assert told.wait(LIMIT_S)
            with pytest.raises(EngineDeadError, match=f"rank {victim.rank} "):
                executor.check()
            processes = [each.process for each in executor._ranks]
        assert all(process.wait(LIMIT_S) == 0 for process in processes)
    print(f"{kills} kills, of which {hit} ended requests")
    assert hit, "no kill hit an answer"
