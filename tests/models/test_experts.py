"""Experts of our own give what transformers' experts give, and compute chosen ones alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from beheld.models import fuse
from beheld.models.experts import Experts, replace_experts
from beheld.models.families import llama4
from tests import tiny

FAMILIES = ("aria", "ernie4_5_vl_moe", "glm4v_moe", "qwen3_omni_moe", "qwen3_vl_moe")


def load(family: str) -> Any:
    from tests.oracle import reference

    return reference.load_model(family, tiny.checkpoint(family))


def first_experts(model: Any) -> tuple[Any, str]:
    """The first module named so, and its name."""
    name = next(name for name, _ in model.named_modules() if name.endswith(".experts"))
    return model.get_submodule(name), name


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in tiny.TINY])
@torch.inference_mode()
def test_experts_give_what_transformers_give(family: str) -> None:
    torch.manual_seed(0)
    model = load(family)
    old, name = first_experts(model)
    if not hasattr(old, "is_transposed"):
        pytest.skip("an older class, which is left as it is")
    H, E = old.gate_up_proj.shape[1 if old.is_transposed else 2], old.gate_up_proj.shape[0]
    x_TH = torch.randn(13, H)
    weights_TK, experts_TK = torch.rand(13, E).topk(2)
    expected = old(x_TH, experts_TK, weights_TK)
    assert replace_experts(model, torch.float32) > 0
    made = model.get_submodule(name)
    assert isinstance(made, Experts)
    torch.testing.assert_close(made(x_TH, experts_TK, weights_TK), expected, atol=1e-5, rtol=1e-4)
    assert fuse.replace_linears(made, fuse.PackedLinear, torch.float32) == 2 * E
    torch.testing.assert_close(made(x_TH, experts_TK, weights_TK), expected, atol=1e-5, rtol=1e-4)
    # The expert behind the last stands for none, also for all of them.
    experts_TK[3] = E
    found = made(x_TH, experts_TK, weights_TK)
    assert (found[3] == 0).all()
    torch.testing.assert_close(found[4:], expected[4:], atol=1e-5, rtol=1e-4)
    assert (made(x_TH, torch.full_like(experts_TK, E), weights_TK) == 0).all()


@torch.inference_mode()
def test_experts_that_nobody_chose_are_not_computed() -> None:
    class Never(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("computed")

    ups, downs = (nn.Linear(8, 12, bias=False), Never()), (nn.Linear(6, 8, bias=False), Never())
    experts = Experts(list(ups), list(downs), nn.SiLU())
    zeros = torch.zeros(5, 1, dtype=torch.int64)
    assert experts(torch.randn(5, 8), zeros, torch.ones(5, 1)).shape == (5, 8)


@torch.inference_mode()
def test_llama4_computes_chosen_experts_and_gives_the_same() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    torch.manual_seed(0)
    model = load("llama4")
    blocks = [m for m in model.modules() if isinstance(m, Llama4TextMoe)]
    assert blocks
    for choices in (1, 2):
        block = blocks[0]
        block.top_k = block.router.top_k = choices
        x_1TH = torch.randn(1, 11, block.hidden_dim)
        expected = block(x_1TH)[0]
        found = llama4.ChosenExperts(block)(x_1TH)[0]
        torch.testing.assert_close(found.view_as(expected), expected, atol=1e-5, rtol=1e-4)


def test_experts_of_another_form_are_left_alone() -> None:
    class Biased(nn.Module):
        has_gate, has_bias, is_transposed = True, True, False

        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(2, 4, 3)), nn.Parameter(torch.ones(2, 3, 2))

    class OwnGate(Biased):
        has_bias = False

        def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for kind in (Biased, OwnGate):
        model = nn.Sequential(kind())
        assert replace_experts(model, torch.float32) == 0
        assert type(model[0]) is kind
