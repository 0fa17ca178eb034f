"""Experts of our own give what transformers' experts give, and compute chosen ones alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from beheld.families.llama4 import model as llama4
from beheld.models.surgery import linears as fuse
from beheld.models.surgery.experts import Experts, GroupedExperts, experts_of, replace_experts
from beheld.models.surgery.operation import Changes
from beheld.platform.cuda import Cuda
from beheld.platform.registry import PLATFORMS
from tests import tiny
from tests.platform import stand_in

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
    assert replace_experts(model, torch.float32, Changes()) > 0
    made = model.get_submodule(name)
    assert isinstance(made, Experts)
    torch.testing.assert_close(made(x_TH, experts_TK, weights_TK), expected, atol=1e-5, rtol=1e-4)
    assert fuse.replace_linears(made, fuse.PackedLinear, torch.float32, Changes()) == 2 * E
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_grouped_experts_give_what_single_ones_give(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up, down = torch.randn(5, 16, 48).to(dtype), torch.randn(5, 24, 16).to(dtype)
    alone, grouped = experts_of(gate_up, down, nn.SiLU(), transposed=True), GroupedExperts(gate_up, down, nn.SiLU())
    for experts_TK in (torch.tensor([[4, 0], [0, 1], [4, 1], [1, 4]]), torch.full((3, 1), 2), torch.arange(5)[:, None]):
        x_TH = torch.randn(len(experts_TK), 16).to(dtype)
        weights_TK = torch.rand(experts_TK.shape)
        expected = alone(x_TH, experts_TK, weights_TK).float()
        error = (grouped(x_TH, experts_TK, weights_TK).float() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 1e-2)


@torch.inference_mode()
def test_off_a_cpu_llama4_computes_chosen_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where nothing is computed: the chosen expert, the shared one, and the router."""

    class Grouping(Cuda):
        grouped_products = True

    monkeypatch.setitem(PLATFORMS, "meta", Grouping())
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    stand_in.register(monkeypatch)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 16, "num_experts_per_tok": 1}
    for dtype, grouped in ((torch.bfloat16, True), (torch.float32, False)):
        with torch.device("meta"):
            block = Llama4TextMoe(Llama4TextConfig(**sizes)).to(dtype)
        attention = SimpleNamespace(attn_temperature_tuning=False)
        layer = SimpleNamespace(feed_forward=block, self_attn=attention)
        decoder = SimpleNamespace(model=SimpleNamespace(layers=[layer]))
        llama4.adapt(SimpleNamespace(get_decoder=lambda decoder=decoder: decoder), Changes())
        with FlopCounterMode(display=False) as counted:
            layer.feed_forward(torch.empty(1, 256, 64, device="meta", dtype=dtype))
        one = 256 * 2 * 3 * 64 * 128
        assert (counted.get_total_flops() < 2.2 * one) == grouped


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
        assert replace_experts(model, torch.float32, Changes()) == 0
        assert type(model[0]) is kind
