"""Greedy answers on a GPU equal transformers' on a CPU in float32: graphs, compiled layers and kernels change none."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld import SamplingParams
from tests import census, tiny
from tests.oracle import cases, reference, test_whisper
from tests.oracle.test_oracle import make, request

FAMILIES = (
    *("qwen3_vl", "mllama", "llava", "llava_onevision", "gemma3", "qwen2_5_vl", "paligemma"),
    # Layers, caches and towers of other kinds.
    *("lfm2_vl", "llama4", "ernie4_5_vl_moe", "qwen2_audio", "gemma3n", "florence2", "molmo2", "chameleon", "phi4_mm"),
    # A picture and a sound in one prompt, and experts.
    "qwen3_omni_moe",
    # Recurrent states, latent attention, sinks.
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss"),
    # Definitions of our own.
    *("ultravox", "qwen_vl", "glm4v_9b", "molmo", "phi3_v", "deepseek_ocr"),
)

# Types whose checkpoints the census makes: states, latents, sinks and an indexer.
TYPES = (
    *("bamba", "mamba", "mamba2", "falcon_mamba", "zamba2", "rwkv", "minimax", "kimi_linear", "nemotron_h_omni"),
    *("falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"),
    *("longcat_flash", "axk1", "deepseek_v32", "kimi_k25", "minimax_m3_vl", "mimo_v2_flash", "flint", "granite_swa"),
)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in tiny.TINY])
def test_tokens_equal(family: str) -> None:
    # A third of a GPU, so that other tests can run beside.
    llm = make(family, cases.options(family, "roomy") | {"max_num_seqs": 8, "gpu_memory_utilization": 0.3})
    try:
        for case in cases.cases(family):
            params = [SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True) for ask in case.asks]
            outputs = llm.generate([request(family, ask) for ask in case.asks], params, use_tqdm=False)
            for ask, output in zip(case.asks, outputs, strict=True):
                want = reference.answer(family, ask)
                assert tuple(output.outputs[0].token_ids) == want.token_ids, (case.name, ask.content)
        assert llm.stats().retried == 0, "a step that fails gives the same answers, one by one"
    finally:
        llm.close()


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_the_census_run(kind: str) -> None:
    """Cut prompts, prefixes from the cache and preemption; a transformers that lacks the type says so."""
    found = census.examine(kind)
    if found.verdict == "untried":
        pytest.skip(found.said)
    assert (found.verdict, found.said) == ("run", "")


def test_whisper_tokens_equal() -> None:
    """States of audio, and answers by Whisper's rules."""
    with test_whisper.make(gpu_memory_utilization=0.3) as llm:
        test_whisper.check(llm, *test_whisper.ALL)
        assert llm.stats().retried == 0
