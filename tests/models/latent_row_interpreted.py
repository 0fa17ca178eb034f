"""Layers of latent attention in Triton's interpreter, on a CPU; test_latent_row.py runs this in its own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from beheld.models import normed_row_kernel, shared_expert_kernel
from beheld.models.normed_row_kernel import is_small, normed_row
from beheld.models.one_row import OneRowLinear
from beheld.models.shared_expert_kernel import inner, outer
from beheld.models.surgery.expert_row import use_expert_rows
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.latent import pass_latents_on
from beheld.models.surgery.latent_row_layer import (
    GatedRow,
    LatentRowLayer,
    SharedExpertRow,
    _same,
    latent_form,
)
from beheld.models.surgery.linears import replace_linears
from beheld.models.surgery.one_row_layer import _watched, layers_of_forms
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.route_row import use_row_routers
from tests import census, tiny
from tests.long import LONG

FAMILIES = ("glm4_moe_lite", "deepseek_v3")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("from_one", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 40), (13, 1000), (1100, 33), (3, 4096)])
def test_products_of_a_normalized_row(outputs: int, inputs: int, from_one: bool, bias: bool) -> None:
    chance = torch.Generator().manual_seed(outputs)
    x_K, norm_K = torch.randn(inputs, generator=chance), torch.rand(inputs, generator=chance)
    weight_NK = torch.randn(outputs, inputs, generator=chance)
    bias_N = torch.randn(outputs, generator=chance) if bias else None
    want_K = nn.functional.rms_norm(x_K.double(), (inputs,), eps=1e-6) * (norm_K.double() + from_one)
    want_N = weight_NK.double() @ want_K + (0.0 if bias_N is None else bias_N.double())
    normed_K = torch.full_like(x_K, float("nan"))
    got_N = normed_row(x_K, norm_K, 1e-6, weight_NK, bias_N, from_one=from_one, early=False, normed_K=normed_K)
    torch.testing.assert_close(got_N.double(), want_N, atol=4e-6 * inputs**0.5, rtol=1e-5)
    torch.testing.assert_close(normed_K.double(), want_K, atol=1e-5, rtol=1e-5)


def test_large_products_have_a_norm_before_them() -> None:
    """Of GLM-4.7-Flash: q_a and kv_a, q_b; gate and up of its dense layer. Of DeepSeek-V3: q_a and kv_a, q_b."""
    shapes = ((1344, 2048), (5120, 768), (20480, 2048), (2112, 7168), (24576, 1536))
    assert [is_small(torch.empty(shape, device="meta")) for shape in shapes] == [True, True, False, False, False]


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize(("hidden", "units", "shared"), [(7, 5, 5), (16, 12, 24), (24, 40, 20)])
def test_experts_with_one_that_every_row_takes(hidden: int, units: int, shared: int, tanh: bool) -> None:
    """Of sizes that fill their lanes and that do not; the last choice names no expert."""
    chance = torch.Generator().manual_seed(hidden)
    choice_C, share_C = torch.tensor([4, 0, 1, 5]), torch.rand(4, generator=chance)
    up_EDH, shared_DH = torch.randn(5, 2 * units, hidden, generator=chance), torch.randn(2 * shared, hidden)
    down_EHI, shared_HS = torch.randn(5, hidden, units, generator=chance), torch.randn(hidden, shared)
    x_H, residual_H = torch.randn(hidden, generator=chance), torch.randn(hidden, generator=chance)

    def gated(weight_DH: Tensor) -> Tensor:
        gate, up = (weight_DH.double() @ x_H.double()).chunk(2)
        return (nn.functional.gelu(gate, approximate="tanh") if tanh else nn.functional.silu(gate)) * up

    want = [gated(shared_DH), *(gated(up_EDH[expert]) for expert in (4, 0, 1))]
    got = inner(x_H, up_EDH, shared_DH, choice_C, tanh=tanh, early=False)
    torch.testing.assert_close(got[: shared + 3 * units].double(), torch.cat(want), atol=1e-5, rtol=1e-4)
    want_H = residual_H.double() + shared_HS.double() @ want[0]
    for share, expert, units_I in zip(share_C, (4, 0, 1), want[1:], strict=False):
        want_H += share * (down_EHI[expert].double() @ units_I)
    got_H = outer(got, down_EHI, shared_HS, choice_C, share_C, residual_H, early=False)
    torch.testing.assert_close(got_H.double(), want_H, atol=1e-4, rtol=1e-4)


def layers_of(family: str) -> tuple[Any, dict[nn.Module, Callable[..., Tensor]]]:
    """A text model, in float16, for the interpreter rounds to bfloat16 by cutting; and its layers of the form."""
    from transformers import AutoModelForCausalLM

    # One dense layer and one with experts: a third would be of a kind that there is.
    model = AutoModelForCausalLM.from_pretrained(
        tiny.checkpoint(family), dtype=torch.float16, num_hidden_layers=3 if LONG else 2
    )
    return prepared(model.eval())


def prepared(model: Any) -> tuple[Any, dict[nn.Module, Callable[..., Tensor]]]:
    """As an engine changes it before it looks for the form."""
    text, changes = text_model(model), Changes()
    assert pass_latents_on(text, changes)
    fuse_linears(text, changes)
    use_expert_rows(text, changes, RankTrial(None))
    use_row_routers(text, torch.float16, changes, RankTrial(None))
    replace_linears(text, OneRowLinear, torch.float16, changes)
    return text, layers_of_forms(text, [latent_form])


@pytest.mark.parametrize(
    ("family", "small"),
    [(family, small) for small in (True, False) for family in FAMILIES[: None if small or LONG else 1]],
)
@torch.inference_mode()
def test_layers_are_found_and_the_model_is_as_before(family: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        # As if products were too large to have their norms within.
        monkeypatch.setattr(normed_row_kernel, "MOST_INPUTS", 0)
    text, found = layers_of(family)
    assert set(found) == set(text.layers)
    assert all(isinstance(each, LatentRowLayer) and each.growth is None for each in found.values())
    kinds = {type(each.mlp) for each in found.values() if isinstance(each, LatentRowLayer)}
    dense = [layer for layer in text.layers if not hasattr(layer.mlp, "experts")]
    assert kinds == {GatedRow, SharedExpertRow}
    assert 0 < len(dense) < len(text.layers)
    # Each was compared with the original as it was found, and again here, with other numbers.
    for layer, made in found.items():
        seen = _watched(text, 5)[layer]
        assert isinstance(made, LatentRowLayer)
        assert _same(made, seen, RankTrial(None))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in text.layers)


@pytest.mark.parametrize("beta", [0.1, pytest.param(0.7, marks=pytest.mark.skipif(not LONG, reason="long"))])
@torch.inference_mode()
def test_queries_that_grow_with_positions(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral 4: as its configuration says, and not if the layer computes something else."""
    from transformers import Mistral4ForCausalLM
    from transformers.models.mistral4 import modeling_mistral4

    torch.manual_seed(0)
    model: Any = Mistral4ForCausalLM(census.tiny_config("mistral4")).half().eval()
    rope = model.config.rope_parameters
    assert rope["llama_4_scaling_beta"] == 0.1
    scale = modeling_mistral4.get_llama_4_attn_scale
    monkeypatch.setattr(
        modeling_mistral4, "get_llama_4_attn_scale", lambda positions, _, span: scale(positions, beta, span)
    )
    text, found = prepared(model)
    if beta != 0.1:
        assert not found
        return
    assert set(found) == set(text.layers)
    assert {made.growth for made in found.values() if isinstance(made, LatentRowLayer)} == {(0.1, 8192.0)}


CHANGES = ("activation", "norm", "choice", "limit", "kernel")
# Each takes the interpreter a quarter of a minute.
if LONG:
    CHANGES += ("shared expert", "rotation", "latent norm")


@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_a_layer_that_computes_something_else_is_not_taken(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as modeling

    kinds = modeling.Glm4MoeLiteMoE, modeling.Glm4MoeLiteRMSNorm, modeling.Glm4MoeLiteTopkRouter
    if change == "activation":
        monkeypatch.setattr(modeling, "ACT2FN", {"silu": nn.ReLU()})
    if change == "shared expert":
        plain = kinds[0].forward
        halved = lambda self, x: plain(self, x) - 0.5 * self.shared_experts(x)  # noqa: E731
        monkeypatch.setattr(kinds[0], "forward", halved)
    if change == "rotation":
        turn = modeling.apply_rotary_pos_emb_interleave
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb_interleave", lambda q, k, cos, sin: turn(q, k, cos, -sin))
    if change == "norm":
        monkeypatch.setattr(kinds[1], "forward", lambda self, x: self.weight * x)
    if change == "latent norm":
        norm = kinds[1].forward
        twice = lambda self, x: norm(self, x) * (2.0 if len(self.weight) == 32 else 1.0)  # noqa: E731
        monkeypatch.setattr(kinds[1], "forward", twice)
    if change == "choice":
        route = kinds[2].forward
        last = lambda self, x: (*route(self, x)[:2], route(self, x)[2] * 0)  # noqa: E731
        monkeypatch.setattr(kinds[2], "forward", last)
    if change == "limit":
        gate = modeling.Glm4MoeLiteExperts._apply_gate
        # No row of a trial reaches it.
        limited = lambda self, x: gate(self, x.clamp(-50, 50))  # noqa: E731
        monkeypatch.setattr(modeling.Glm4MoeLiteExperts, "_apply_gate", limited)
    if change == "kernel":
        # As Triton's own errors, which have no class but this in common with others.
        fails = Mock(side_effect=type("OutOfResources", (Exception,), {})())
        monkeypatch.setattr(shared_expert_kernel, "inner", fails)
    text, found = layers_of("glm4_moe_lite")
    experts = {layer for layer in text.layers if hasattr(layer.mlp, "experts")}
    assert not experts & set(found)
    assert not found or change in ("shared expert", "choice", "limit", "kernel")
