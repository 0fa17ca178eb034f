"""Layers of latent attention pass their latents on, by their form, and get their parts back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from beheld.attention.latent import LatentUp
from beheld.core.errors import ModelError
from beheld.models.surgery.latent import pass_latents_on
from beheld.models.surgery.operation import Changes
from tests import tiny
from tests.oracle import reference

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def load(family: str) -> Any:
    return reference.load_model(family, tiny.checkpoint(family))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_what_was_taken_over_is_given_back(family: str) -> None:
    model, changes = load(family), Changes()
    ids = torch.arange(9)[None]
    expected, weights = model(ids).logits, {name: w.clone() for name, w in model.named_parameters()}
    assert pass_latents_on(model, changes) == 3
    attention = model.model.layers[1].self_attn
    assert isinstance(attention.kv_b_proj, LatentUp)
    key, value = attention.expand_kv(torch.ones(1, 1, 5, 32), torch.zeros(1, 1, 5, 8))
    assert key.shape == (1, 1, 5, 40)
    assert value.shape == (1, 1, 5, 32)
    # Neither copied nor twice in the model.
    assert {name: w.shape for name, w in model.named_parameters()} == {n: w.shape for n, w in weights.items()}
    changes.take_back()
    assert type(attention.kv_b_proj) is nn.Linear
    assert all(torch.equal(w, weights[name]) for name, w in model.named_parameters())
    assert torch.equal(model(ids).logits, expected)


def test_a_layer_that_expands_otherwise_is_refused() -> None:
    model = load("deepseek_v3")
    for attention in (layer.self_attn for layer in model.model.layers):
        expand = attention.expand_kv
        attention.expand_kv = lambda kv, rot, expand=expand: tuple(2 * part for part in expand(kv, rot))
    with pytest.raises(ModelError, match="makes other keys and values"):
        pass_latents_on(model, Changes())


def test_a_bias_is_refused() -> None:
    model = load("deepseek_v3")
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj.bias = nn.Parameter(torch.ones(attention.kv_b_proj.out_features))
    with pytest.raises(ModelError, match="another form"):
        pass_latents_on(model, Changes())


def test_other_layers_are_left_alone() -> None:
    assert pass_latents_on(load("llama"), Changes()) == 0
