"""Ranks on a single GPU: two that add up over gloo, and one that adds up by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld import SamplingParams
from beheld.parallel.group import RankGroup
from beheld.platform.nccl import NCCL
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.test_oracle import make, request

FAMILIES = ("llama", "qwen2_5_vl", "deepseek_v3", "qwen3_5")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in tiny.TINY])
def test_two_ranks_on_one_gpu_give_the_reference_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_ONE_GPU", "1")
    options = cases.options(family, "roomy") | {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enforce_eager": True,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**28,
    }
    with make(family, options) as llm:
        asks = cases.mixed(family)
        params = [SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True) for ask in asks]
        outputs = llm.generate([request(family, ask) for ask in asks], params, use_tqdm=False)
        for ask, output in zip(asks, outputs, strict=True):
            assert tuple(output.outputs[0].token_ids) == reference.answer(family, ask).token_ids, ask
        assert llm.stats().retried == 0


def test_one_rank_adds_up_by_nccl_in_a_graph(tmp_path: Path) -> None:
    group = RankGroup(0, 1, tmp_path, NCCL, lambda: None)
    try:
        x = torch.arange(5000.0, device="cuda")
        group.sum_(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
            group.sum_(x)
        for _ in range(3):
            graph.replay()
        assert torch.equal(x.cpu(), torch.arange(5000.0) + 3)
        assert torch.equal(group.joined(x).cpu(), torch.arange(5000.0) + 3)
        del graph
    finally:
        group.close()
