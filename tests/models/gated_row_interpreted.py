"""Layers with gates in Triton's interpreter, on a CPU; test_gated_row.py runs this in its own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.attention.backend import StateOf
from beheld.attention.context import ForwardContext, forward_context
from beheld.attention.delta_rule import delta_row
from beheld.attention.gated_delta import GatedDelta, Gates, decay_of
from beheld.attention.recurrent import recur
from beheld.attention.torch_ref import TorchBackend
from beheld.attention.triton_paged import TritonBackend
from beheld.families import registry
from beheld.models import normed_row_kernel
from beheld.models.gated_row_kernel import gated_norm, sigmoid_gated
from beheld.models.one_row import OneRowLinear
from beheld.models.one_row_kernel import turn
from beheld.models.surgery.gated_row_layer import (
    DeltaRowLayer,
    GatedAttentionRowLayer,
    delta_form,
    gated_attention_form,
)
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.linears import replace_linears
from beheld.models.surgery.one_row_layer import layers_of_forms
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from tests import tiny
from tests.attention.delta_interpreted import ODD, SMALL, channels, layer, metadata_of

FORMS = [delta_form, gated_attention_form]


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products have their norms before them, as a model that people run: small ones are test_latent_row.py's."""
    monkeypatch.setattr(normed_row_kernel, "MOST_INPUTS", 0)


@pytest.mark.parametrize(("heads", "size"), [(1, 1), (3, 20), (2, 128)])
def test_heads_are_gated(heads: int, size: int) -> None:
    chance = torch.Generator().manual_seed(size)
    x_MV, weight_V = torch.randn(heads, size, generator=chance), torch.randn(size, generator=chance)
    # Gates lie apart, as next to heads of queries; one would overflow an exponential.
    gate_MV = torch.randn(heads, 3 * size, generator=chance)[:, size : 2 * size]
    gate_MV[0, 0] = -200.0
    normed_MV = nn.functional.rms_norm(x_MV.double(), (size,), eps=1e-6) * weight_V.double()
    want = normed_MV * nn.functional.silu(gate_MV.double())
    close = {"atol": 1e-5, "rtol": 1e-5}
    got = gated_norm(x_MV, gate_MV, weight_V, 1e-6, early=False)
    torch.testing.assert_close(got.double(), want.flatten(), **close)
    want = x_MV.double() * gate_MV.double().sigmoid()
    torch.testing.assert_close(sigmoid_gated(x_MV, gate_MV, early=False).double(), want.flatten(), **close)


@pytest.mark.parametrize("turned", [4, 8])
def test_queries_next_to_gates_are_turned_as_without(turned: int) -> None:
    chance = torch.Generator().manual_seed(0)
    q_QC, gate_QC, kv_NC = (torch.randn(heads, 8, generator=chance) for heads in (3, 3, 4))
    norms = torch.randn(2, 8, generator=chance), 1e-6
    angles = torch.randn(turned // 2, generator=chance).repeat(2)
    plain = torch.cat([q_QC, kv_NC]).flatten()
    gated = torch.cat([torch.stack([q_QC, gate_QC], dim=1).flatten(0, 1), kv_NC]).flatten()
    for qkv, own in ((plain, False), (gated, True)):
        turn(qkv, (3, 2), angles.cos(), angles.sin(), norms, from_one=True, early=False, gated=own)
    rows_NC = gated.view(-1, 8)
    assert torch.equal(torch.cat([rows_NC[:6:2], rows_NC[6:]]).flatten(), plain)
    assert torch.equal(rows_NC[1:6:2], gate_QC)


@pytest.mark.parametrize("rule", [SMALL, ODD], ids=lambda rule: f"{rule.key_dim}x{rule.value_dim}")
@pytest.mark.parametrize("step", [(0, 1, [3]), (9, 10, [0, 5])])
def test_decay_and_strength_are_made_in_the_kernel(step: tuple[int, int, list[int]], rule: GatedDelta) -> None:
    metadata, chance = metadata_of([step]), torch.Generator().manual_seed(2)
    x_1C = torch.randn(1, channels(rule), generator=chance)
    weight_CL = torch.randn(channels(rule), 4, generator=chance)
    a_1H, b_1H = torch.randn(2, 1, rule.value_heads, generator=chance) * 3
    # Beyond 20 softplus is linear.
    a_1H[0, 0] = 25.0
    gates = Gates(*(torch.randn(2, rule.value_heads, generator=chance)))
    caches, found = [layer(rule, 40) for _ in range(3)], []
    for backend, cache in zip((TorchBackend(), TritonBackend()), caches, strict=False):
        metadata.groups[0].extra.clear()
        with forward_context(ForwardContext(backend, metadata, {StateOf(3): cache})):
            found.append(delta_row(3, x_1C, a_1H, b_1H, gates, (weight_CL, None), rule))
    metadata.groups[0].extra.clear()
    given = decay_of(a_1H, *gates), b_1H.sigmoid()
    with forward_context(ForwardContext(TorchBackend(), metadata, {StateOf(3): caches[2]})):
        silu = nn.functional.silu
        want_HV = recur(3, x_1C, weight_CL, None, lambda y_TC: (silu(y_TC), *given), rule)[0]
    close = {"rtol": 2e-4, "atol": 2e-4}
    for got_HV, cache in zip(found, caches, strict=False):
        torch.testing.assert_close(got_HV, want_HV, **close)
        torch.testing.assert_close(cache.states[1:], caches[2].states[1:], **close)
        torch.testing.assert_close(cache.inputs[1:], caches[2].inputs[1:], **close)


def layers_of(family: str = "qwen3_5") -> tuple[Any, dict[nn.Module, Callable[..., Tensor]]]:
    """A text model as an engine changes it, in float16 (the interpreter rounds to bfloat16 by cutting), and its layers
    of the forms."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(tiny.checkpoint(family), dtype=torch.float16).eval()
    changes = Changes()
    adapt = registry.model(f"beheld.families.{family}").adapt
    assert adapt is not None
    adapt(model, changes)
    text = text_model(model)
    fuse_linears(text, changes)
    replace_linears(text, OneRowLinear, torch.float16, changes)
    return text, layers_of_forms(text, FORMS, states=True)


@torch.inference_mode()
def test_layers_are_found() -> None:
    """Each is compared with the original as it is found: what it writes, what attention gets, what it gives."""
    text, found = layers_of()
    kinds = [type(found.get(each)) for each in text.layers]
    assert kinds == [DeltaRowLayer if hasattr(each, "linear_attn") else GatedAttentionRowLayer for each in text.layers]
    assert set(kinds) == {DeltaRowLayer, GatedAttentionRowLayer}
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in text.layers)


@torch.inference_mode()
def test_without_states_no_layer_is_tried() -> None:
    text, found = layers_of()
    assert found
    assert not layers_of_forms(text, FORMS)


CHANGES = {
    "decay": {GatedAttentionRowLayer},
    "strength": {GatedAttentionRowLayer},
    "norm of heads": {GatedAttentionRowLayer},
    "gate": {DeltaRowLayer},
    "rotation": {DeltaRowLayer},
    "activation": set(),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_a_layer_that_computes_something_else_is_not_taken(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those of the other kind are."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    from beheld.families._shared.gated_delta import mixer

    if change == "decay":
        monkeypatch.setattr(mixer, "decay_of", lambda *given: 2 * decay_of(*given))
    if change == "strength":
        monkeypatch.setattr(mixer.DeltaMixer, "strength", lambda self, b_TM: 2 * b_TM.sigmoid())
    if change == "norm of heads":
        norm = modeling.Qwen3_5RMSNormGated.forward
        monkeypatch.setattr(
            modeling.Qwen3_5RMSNormGated, "forward", lambda self, x, gate: norm(self, x, gate.sigmoid())
        )
    if change == "activation":
        monkeypatch.setattr(modeling, "ACT2FN", {**modeling.ACT2FN, "silu": nn.ReLU()})
    if change == "gate":
        monkeypatch.setattr(modeling.torch, "sigmoid", lambda x: x)
    if change == "rotation":
        plain = modeling.apply_rotary_pos_emb
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: plain(q, k, cos, -sin))
    _, found = layers_of()
    assert {type(each) for each in found.values()} == CHANGES[change]
