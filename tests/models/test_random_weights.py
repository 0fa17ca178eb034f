"""Random weights are the same on every rank, and no rank holds the whole model while it makes them."""

from __future__ import annotations

import functools

import pytest
import torch

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.models.load import model_class_of
from beheld.models.random_weights import random_model
from beheld.models.shard_weights import shard
from tests import tiny


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "gemma3", "glm4v_moe", "qwen3_5", "gpt_oss"])
def test_ranks_hold_parts_of_one_model(family: str) -> None:
    folder = tiny.checkpoint(family)
    args = EngineArgs(model=str(folder), dtype="float32")
    config = read_config(folder, args)
    info = read_info(folder, args, config)
    made = functools.partial(random_model, model_class_of(info, config), config, torch.float32, "cpu")
    own = torch.get_rng_state()
    whole = dict(made().named_parameters(remove_duplicate=False))
    assert torch.equal(torch.get_rng_state(), own)
    for rank in range(2):
        model = made(lambda model, rank=rank: shard(model, info, rank, 2, None))
        assert model.shard_plan.cuts
        held = dict(model.named_parameters(remove_duplicate=False))
        assert held.keys() == whole.keys()
        for name, weight in held.items():
            assert not weight.is_meta, name
            cut = model.shard_plan.cuts.get(name)
            want = whole[name] if cut is None else cut.of(whole[name], whole[name].shape)
            assert torch.equal(weight, want), name
        assert not any(buffer.is_meta for buffer in model.buffers())


def test_the_largest_part_that_exists_is_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.checkpoint("llama")
    args = EngineArgs(model=str(folder), dtype="float32")
    config = read_config(folder, args)
    info = read_info(folder, args, config)
    seen: list[bool] = []

    def cut(model: torch.nn.Module) -> object:
        seen.extend(weight.is_meta for weight in model.parameters() if weight.dim() > 1)
        return shard(model, info, 0, 2, None)

    random_model(model_class_of(info, config), config, torch.float32, "cpu", cut)
    assert seen
    assert all(seen), "whole weights had memory before they were cut"
