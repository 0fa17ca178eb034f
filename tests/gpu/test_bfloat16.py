"""In bfloat16 our greedy answers differ from transformers' no more often than its own with other batch sizes do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, GenerationConfig

from beheld import LLM, SamplingParams
from tests import tiny

NEW, COUNT = 32, 96
# How far two shares of 96 may lie apart by chance: three standard deviations of their difference at one half.
CHANCE = 3 * (2 * 0.25 / COUNT) ** 0.5


def theirs(family: str, prompts: list[list[int]], batch: int) -> list[list[int]]:
    """transformers' answers, `batch` prompts at a time, padded on the left."""
    kind: Any = AutoModelForMultimodalLM if family in tiny.MEDIA_FAMILIES else AutoModelForCausalLM
    model = kind.from_pretrained(tiny.checkpoint(family), dtype=torch.bfloat16).cuda().eval()
    model.generation_config = GenerationConfig()
    answers = []
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in part], device="cuda")
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device="cuda")
        out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
        answers += out[:, width:].tolist()
    return answers


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "gemma3"])
def test_differs_no_more_often(family: str) -> None:
    chance = random.Random(1)
    prompts = [[chance.randrange(5, 90) for _ in range(chance.randrange(4, 60))] for _ in range(COUNT)]
    one, eight, many = (theirs(family, prompts, batch) for batch in (1, 8, 32))

    def ours(rows: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        options = {"max_model_len": 128, "max_num_seqs": rows, "num_gpu_blocks_override": 2048}
        path = str(tiny.checkpoint(family))
        with LLM(path, dtype="bfloat16", seed=0, gpu_memory_utilization=0.3, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            assert llm.stats().retried == 0
        return [list(o.outputs[0].token_ids) for o in outputs]

    def share(left: list[list[int]], right: list[list[int]]) -> float:
        return sum(a != b for a, b in zip(left, right, strict=True)) / COUNT

    own = max(share(one, eight), share(one, many), share(eight, many))
    # A single row has products and kernels of its own.
    for rows in (32, 1):
        answers = ours(rows)
        told = {"rows": rows, "ours": [share(answers, other) for other in (one, eight, many)], "transformers": own}
        print(family, told)
        assert max(told["ours"]) <= own + CHANCE, told
