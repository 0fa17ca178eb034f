"""Which weights of a checkpoint each rank reads, and how much of them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.models import shard_weights
from beheld.models.load import joined_slices, model_class_of
from beheld.models.shard_weights import _shares_out, shard
from tests import tiny

FAMILY = "ernie4_5_vl_moe"
EXPERT = re.compile(r"layers\.1\.mlp\.experts\.(\d+)\.(\w+)\.weight")


def read(rank: int, *, whole_experts: bool) -> tuple[Any, dict[tuple[int, str], list[int]]]:
    """A rank's plan, and the shapes of what it reads of the experts of a layer."""
    folder = tiny.checkpoint(FAMILY)
    args = EngineArgs(model=str(folder), dtype="float32")
    config = read_config(folder, args)
    info = read_info(folder, args, config)
    weights = joined_slices(folder, ())
    # As the loader makes a model.
    _shares_out.cache_clear()
    with torch.device("meta"):
        model = model_class_of(info, config)._from_config(config, dtype=torch.float32)
        plan = shard(model, info, rank, 2, weights, whole_experts=whole_experts)
    found = ((EXPERT.search(name), weight) for name, weight in weights.items())
    return plan, {(int(at[1]), at[2]): list(weight.get_shape()) for at, weight in found if at is not None}


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_of_two_widths_in_one_list(rank: int) -> None:
    """The checkpoint numbers the experts for text, 48 wide, and those for media, 16 wide, in one row."""
    plan, own = read(rank, whole_experts=False)
    assert not plan.whole
    assert {number for number, _ in own} == set(range(8))
    width = 64
    for number in range(8):
        part = 24 if number < 4 else 8
        assert own[number, "gate_proj"] == own[number, "up_proj"] == [part, width]
        assert own[number, "down_proj"] == [width, part]


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_experts_of_one_list_are_shared_out_for_each_kind(rank: int) -> None:
    plan, own = read(rank, whole_experts=True)
    assert not plan.whole
    first = 2 * rank
    assert {number for number, _ in own} == {first, first + 1, 4 + first, 5 + first}
    assert own[first, "down_proj"] == [64, 48]
    assert own[4 + first, "down_proj"] == [64, 16]


def test_an_operation_that_does_something_else_is_none_of_these() -> None:
    class Strange:
        def __init__(self, stacked: int, joined: int) -> None:
            self.stacked, self.joined = stacked, joined

        def convert(self, lists: dict[str, list[Tensor]], sources: Any, targets: list[str], config: Any) -> Any:
            # Every other one.
            return {
                target: torch.cat([torch.stack(own[place :: len(targets)], self.stacked) for own in lists.values()], 1)
                for place, target in enumerate(targets)
            }

    assert not _shares_out(Strange, 0, 1, 2, 2)
    assert not _shares_out(int, 0, 1, 2, 2)


def test_a_conversion_of_a_module_that_is_not_loaded_says_nothing_of_others() -> None:
    """On a stage without a tower, whose q, k and v are joined, layers with the same ends counted as converted."""
    rule = SimpleNamespace(target_patterns=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])
    text = {f"text.layers.0.self_attn.{end}_proj.weight": torch.empty(0) for end in "qkv"}
    tower = {f"tower.layers.0.self_attn.{end}_proj.weight": torch.empty(0) for end in "qkv"}
    first, *others = tower
    assert shard_weights._further_targets(rule, first, text | tower) == others
    assert shard_weights._further_targets(rule, first, text) == []
