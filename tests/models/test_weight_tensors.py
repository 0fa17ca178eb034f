"""Digests of a model's weights cover every byte that it holds, in whatever form."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.models.weight_tensors import checksums, reset_, weight_tensors
from beheld.runner.runner import ModelRunner
from tests import tiny

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def model_of(llm: LLM) -> torch.nn.Module:
    """The model of the engine in this process."""
    gc.collect()
    (runner,) = [found for found in gc.get_objects() if isinstance(found, ModelRunner)]
    assert llm.llm_engine is not None
    model: torch.nn.Module = runner.adapter.model
    return model


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_mkldnn else tensor


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        ("qwen2_vl", {"dtype": "float32"}),
        ("qwen3_vl_moe", {"dtype": "float32"}),
        ("qwen3_vl_moe", {"quantization": "int4"}),
    ],
)
def test_every_byte_is_in_a_digest_and_can_be_made_zero(family: str, options: dict[str, Any]) -> None:
    with LLM(str(tiny.checkpoint(family)), seed=0, max_model_len=64, **options) as llm:
        before = llm.generate("Hello", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        model = model_of(llm)
        known = checksums(model)
        assert checksums(model) == known
        held = sum(tensor.numel() * tensor.element_size() for _, tensor in weight_tensors(model))
        packed = sum(getattr(module, "packed_bytes", 0) for module in model.modules())
        assert held >= packed + sum(each.numel() * each.element_size() for each in model.parameters())
        reset_(model)
        zero = checksums(model)
        assert zero.keys() == known.keys()
        left = [name for name, tensor in weight_tensors(model) if torch.count_nonzero(dense(tensor))]
        assert left == []
        after = llm.generate("Hello there", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        assert after != before
