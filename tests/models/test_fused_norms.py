"""RMS norms compiled for a CPU give PyTorch's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from beheld.models.surgery.fused_norms import FusedNorm, fuse_norms
from beheld.models.surgery.operation import Changes
from beheld.platform import jit

pytestmark = pytest.mark.skipif(not jit.available(), reason="the package llvmlite is not installed")


def norms(inputs: int) -> nn.ModuleList:
    torch.manual_seed(0)
    made = nn.ModuleList([Qwen2RMSNorm(inputs, 1e-6), Gemma2RMSNorm(inputs)]).bfloat16()
    for norm in made:
        norm.weight.data.copy_(torch.randn(inputs))
    return made


@torch.inference_mode()
def test_numbers_are_those_of_pytorch() -> None:
    model, changes = norms(896), Changes()
    before = model[0]
    assert fuse_norms(model, changes) == 1
    assert isinstance(model[0], FusedNorm)
    assert isinstance(model[1], Gemma2RMSNorm), "its weights are offsets from one"
    x = torch.randn(3, 40, 896).mul_(10).bfloat16()
    x[0, 1] = 0
    x[0, 2, 5] = 3e4
    wanted, found = before(x), model[0](x)
    assert (found != wanted).float().mean() < 0.005
    torch.testing.assert_close(found, wanted, rtol=2.0**-7, atol=0.0)
    assert torch.equal(model[0](x[1, 3]), found[1, 3])
    assert torch.equal(model[0](x.transpose(0, 1))[3, 1], found[1, 3])
    x[2, 2, 2] = float("nan")
    assert model[0](x)[2, 2].isnan().all()
    changes.take_back()
    assert model[0] is before


@torch.inference_mode()
def test_rows_of_another_type_are_normalized_as_before() -> None:
    """FalconMamba adds its layers up in float32. The compiled function took their bytes for bfloat16."""
    model = norms(896)
    before = model[0]
    fuse_norms(model, Changes())
    x = torch.randn(3, 896)
    assert torch.equal(model[0](x), before(x))


def test_other_sizes_stay() -> None:
    assert fuse_norms(norms(40), Changes()) == 0
