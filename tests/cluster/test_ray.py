"""Two nodes of a real Ray on this machine. Skipped without Ray, whose wheel is too large for the `dev` extra."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.core.errors import EngineDeadError
from beheld.executor.ray import RayExecutor
from tests.cluster.nodes import start_cluster
from tests.long import LONG

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.skipif(not LONG, reason="a cluster takes half a minute to start"),
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 80}
PROMPTS = ["Hello", "The cat sat on", "One two three"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes of one core each, so that two ranks or engines are on different ones."""
    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    made = start_cluster(small | {"include_dashboard": False}, small)
    ray.init(address=made.address, log_to_driver=False)
    yield
    ray.shutdown()
    made.shutdown()


def tokens(llm: LLM, count: int = 16) -> list[Any]:
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]


def go_on(llm: LLM) -> None:
    """Answer for as long as it lasts."""
    for _ in range(100):
        tokens(llm, 100)


def test_tokens_are_those_of_one_device_and_a_killed_actor_ends_the_engine(cluster: None) -> None:
    with LLM("mote", **OPTIONS) as llm:
        wanted = tokens(llm)
    with LLM("mote", tensor_parallel_size=2, distributed_executor_backend="ray", **OPTIONS) as llm:
        assert tokens(llm) == wanted
        executor = llm._live().core.executor
        assert isinstance(executor, RayExecutor)
        ray.kill(executor._ranks[0].process._actor)  # type: ignore[union-attr]
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1 on .* is gone"):
            go_on(llm)
        assert time.monotonic() - began < 10.0
    with LLM("mote", data_parallel_size=2, data_parallel_backend="ray", **OPTIONS) as llm:
        assert tokens(llm) == wanted


@pytest.mark.parametrize(
    "options",
    [
        'tensor_parallel_size=2, distributed_executor_backend="ray"',
        'data_parallel_size=2, data_parallel_backend="ray"',
    ],
    ids=["ranks", "engines"],
)
def test_a_script_that_closes_nothing_logs_no_error(cluster: None, options: str) -> None:
    script = f"""
from beheld import LLM

llm = LLM("mote", device="cpu", max_model_len=256, num_gpu_blocks_override=80, {options})
print(len(llm.generate("Hello", use_tqdm=False)))
"""
    address = ray.get_runtime_context().gcs_address
    told = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (told.returncode, told.stdout.strip()) == (0, "1"), told.stderr
    assert "ERROR" not in told.stderr, told.stderr
