"""A rank of a random model keeps no more memory than its part takes."""

from __future__ import annotations

import pytest
import torch

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.models.shard_weights import shard
from tests import tiny


@pytest.mark.parametrize("family", ["llama", "qwen3_vl_moe"])
def test_whole_weights_are_freed(family: str) -> None:
    folder = tiny.checkpoint(family)
    args = EngineArgs(model=str(folder), dtype="float32")
    config = read_config(folder, args)
    info = read_info(folder, args, config)
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForCausalLM if family == "llama" else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    before = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    plan = shard(model, info, 1, 2, None)
    assert plan.cuts
    for name, weight in model.named_parameters():
        assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size(), name
    assert dict(plan.shapes).items() <= before.items(), "the whole weights' shapes, of tied ones too"
