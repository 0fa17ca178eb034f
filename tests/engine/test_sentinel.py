"""Nothing that is computed depends on memory that nobody wrote: free blocks are filled with NaN before every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.core.plan import StepPlan
from tests import tiny

# Full attention, multi-axis positions with pictures, sliding windows with masks that look ahead.
FAMILIES = ("llama", "qwen2_vl", "gemma3")
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 3},
    "overlap": {"async_scheduling": True, "num_gpu_blocks_override": 60},
}


def prompts(family: str) -> list[Any]:
    made: list[Any] = [{"prompt_token_ids": list(range(5, 20 + 7 * n))} for n in range(4)]
    if family != "llama":
        for seed in (1, 2, 1):
            picture = tiny.picture(56, 56, seed)
            made.append({"prompt": tiny.prompt(family, 1, 0, "Hi?"), "multi_modal_data": {"image": picture}})
    return made


def fill_before_every_step(llm: LLM) -> list[int]:
    """Returns a list whose only entry counts the blocks that were filled."""
    assert llm._run is not None
    core = llm._run.core
    runner: Any = core.executor.runner  # type: ignore[attr-defined]
    launch, filled = runner.launch, [0]

    def launched(plan: StepPlan) -> Any:
        for store in core.scheduler._tables.stores:
            free = torch.tensor(store.pool._plain, dtype=torch.long)
            for layer in runner.kv.values():
                if layer.group == store.group:
                    layer.keys[free] = float("nan")
                    layer.values[free] = float("nan")
            filled[0] += len(free)
        return launch(plan)

    runner.launch = launched
    return filled


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("family", FAMILIES)
def test_60_free_memory_is_never_read(family: str, engine: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=1)
    found = []
    for filling in (False, True):
        options = {"max_model_len": 96, "block_size": 4, "max_num_seqs": 8, **ENGINES[engine]}
        with LLM(str(tiny.checkpoint(family)), dtype="float32", seed=0, media_workers=0, **options) as llm:
            filled = fill_before_every_step(llm) if filling else [1]
            # Twice: the second time over what the first has left in the prefix cache.
            outputs = [o for _ in range(2) for o in llm.generate(prompts(family), params, use_tqdm=False)]
            assert filled[0] > 0
        texts = [tuple(output.outputs[0].token_ids) for output in outputs]
        found.append((texts, [output.outputs[0].cumulative_logprob for output in outputs]))
    assert found[0] == found[1]
