"""Experts of families that lay their weights out in a way of their own: replaced, packed and taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from beheld.families import registry
from beheld.models.surgery import linears
from beheld.models.surgery.operation import Changes
from tests import census

# Family -> products that a layer has for its four experts.
REPLACED = {"dbrx": 4 * 2, "jetmoe": 4 * 4}


@pytest.mark.parametrize("family", REPLACED)
@torch.inference_mode()
def test_experts_are_packed_and_taken_back(family: str, tmp_path: Path) -> None:
    model: Any = census.make(family, tmp_path)
    # One token, which leaves experts without rows, and many.
    asked = [torch.randint(5, 400, (1, length), generator=torch.Generator().manual_seed(length)) for length in (1, 40)]
    before = [model(input_ids=ids).logits for ids in asked]
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    changes = Changes()
    places = [type(module) for module in model.modules()]
    adapt = registry.model(registry.find(family)).adapt
    assert adapt is not None
    adapt(model, changes)
    assert places != [type(module) for module in model.modules()]
    packed = linears.replace_linears(model, linears.PackedLinear, torch.float32, changes)
    assert packed >= REPLACED[family] * census._LAYERS
    for ids, logits in zip(asked, before, strict=True):
        torch.testing.assert_close(model(input_ids=ids).logits, logits, atol=2e-5, rtol=1e-4)
    changes.take_back()
    assert places == [type(module) for module in model.modules()]
    taken_back = model.state_dict()
    assert taken_back.keys() == weights.keys()
    for key, weight in weights.items():
        assert torch.equal(taken_back[key], weight), key
