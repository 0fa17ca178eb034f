"""Greedy answers of GPUs that share a model equal transformers' on a CPU in float32, with CUDA graphs and NCCL.

Two GPUs, or as many as BEHELD_TEST_RANKS says.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < int(os.environ.get("BEHELD_TEST_RANKS", "2")):
    pytest.skip("needs as many NVIDIA GPUs as ranks", allow_module_level=True)

from beheld import SamplingParams
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.test_oracle import make, request

# A text model, towers of several kinds, experts, latents, recurrent states, sinks.
FAMILIES = (
    "llama",
    "qwen2_5_vl",
    "qwen3_vl_moe",
    "llava",
    "gemma3",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_5",
    "glm4v_moe",
)
TENSOR: dict[str, Any] = {"tensor_parallel_size": int(os.environ.get("BEHELD_TEST_RANKS", "2"))}
# Small: others may hold most of the memory.
ROOM: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_bytes": 2**28, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        *(pytest.param(family, TENSOR, id=family) for family in FAMILIES if family in tiny.TINY),
        pytest.param("qwen2_5_vl", TENSOR | {"mm_encoder_tp_mode": "data"}, id="qwen2_5_vl-data"),
        pytest.param("qwen3_vl_moe", TENSOR | {"enable_expert_parallel": True}, id="qwen3_vl_moe-experts"),
        pytest.param("llama", {"pipeline_parallel_size": 2}, id="llama-stages"),
        pytest.param("qwen2_5_vl", {"pipeline_parallel_size": 2}, id="qwen2_5_vl-stages"),
    ],
)
def test_tokens_equal(family: str, more: dict[str, Any]) -> None:
    with make(family, cases.options(family, "roomy") | ROOM | more) as llm:
        asks = cases.mixed(family)
        for round_ in (asks, asks[::-1]):
            params = [SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True) for ask in round_]
            outputs = llm.generate([request(family, ask) for ask in round_], params, use_tqdm=False)
            for ask, output in zip(round_, outputs, strict=True):
                assert tuple(output.outputs[0].token_ids) == reference.answer(family, ask).token_ids, ask
        assert llm.stats().retried == 0
