"""Layers with gates for a single row on a GPU: in chains of kernels that start early, and in an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.attention.triton_delta import TritonDelta
from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.families import registry
from beheld.models.gated_row_kernel import gated_norm, sigmoid_gated
from beheld.models.load import load_model
from beheld.models.one_row import OneRowLinear, early_start
from beheld.models.surgery.gated_row_layer import (
    DeltaRowLayer,
    GatedAttentionRowLayer,
    delta_form,
    gated_attention_form,
)
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.linears import replace_linears
from beheld.models.surgery.one_row_layer import layers_of_forms, probed
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.recurrent_trial import trial_states
from tests import tiny
from tests.gpu.row_answers import same_answers
from tests.gpu.test_one_row import check_in_a_graph

DEVICE = torch.device("cuda")


# Of Qwen3.5-4B: heads of values, and heads of attention with their gates between queries.
@pytest.mark.parametrize(("heads", "size"), [(32, 128), (16, 256)])
def test_heads_are_gated(heads: int, size: int) -> None:
    torch.manual_seed(0)
    x_MV, both_M2V = torch.randn(heads, size, device=DEVICE), torch.randn(heads, 2, size, device=DEVICE)
    x_MV, both_M2V = x_MV.bfloat16(), both_M2V.bfloat16()
    weight_V = torch.rand(size, device=DEVICE).bfloat16()
    gate_MV, early = both_M2V[:, 1], early_start(DEVICE)
    normed_MV = (x_MV.float() * torch.rsqrt(x_MV.float().pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight_V
    want = (normed_MV.float() * nn.functional.silu(gate_MV.float())).bfloat16()
    got = gated_norm(x_MV, gate_MV, weight_V, 1e-6, early=early)
    torch.testing.assert_close(got.view(want.shape), want, rtol=2e-2, atol=1e-3)
    got = sigmoid_gated(x_MV, gate_MV, early=early)
    torch.testing.assert_close(got.view(want.shape), x_MV * gate_MV.sigmoid(), rtol=2e-2, atol=1e-3)


def forms_of(model: Any) -> tuple[Any, list[Callable[..., Tensor]]]:
    """A text model changed as an engine changes it, and its layers in their forms."""
    changes = Changes()
    adapt = registry.model("beheld.families.qwen3_5").adapt
    assert adapt is not None
    adapt(model, changes)
    text = text_model(model)
    fuse_linears(text, changes)
    replace_linears(text, OneRowLinear, torch.bfloat16, changes)
    # Each is compared with the original as it is found.
    found = layers_of_forms(text, [delta_form, gated_attention_form], states=True)
    return text, [found[layer] for layer in text.layers]


def test_layers_by_our_kernels_are_the_originals() -> None:
    """In a chain whose kernels all begin as early as they can, each finds what all before it have written."""
    config = EngineArgs(model=str(tiny.checkpoint("qwen3_5")), dtype="bfloat16", device="cuda")
    resolved = resolve_and_decide(config)
    text, layers = forms_of(load_model(resolved.hf_config, resolved.info, resolved.config).target.model)
    assert {type(layer) for layer in layers} == {DeltaRowLayer, GatedAttentionRowLayer}
    for layer in layers:
        if isinstance(layer, GatedAttentionRowLayer):
            layer.attend = lambda _, q, k, v, __, scale, ___: probed(q, k, v, scale)
    x = torch.randn(1, 1, text.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    rope = text.config.rope_parameters
    rotary = int(text.config.head_dim * rope.get("partial_rotary_factor", 1.0))
    angles = torch.randn(1, 1, rotary // 2, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def chain(after_each: Callable[[], object] = lambda: None) -> torch.Tensor:
        y = x
        for layer in layers * 8:
            y = layer(y, position_embeddings=(cos, sin))
            after_each()
        return y

    with torch.inference_mode(), trial_states(text.layers, TritonDelta()):
        want = chain(torch.cuda.synchronize)
        check_in_a_graph(chain, want)


def test_an_engine_uses_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its greedy answers are those of the layers as compiled, in bfloat16."""
    calls: list[int] = []
    plain = DeltaRowLayer.__call__
    monkeypatch.setattr(DeltaRowLayer, "__call__", lambda self, *a, **k: (calls.append(1), plain(self, *a, **k))[1])
    same_answers("qwen3_5", "BEHELD_GATED_ROWS", monkeypatch, calls)
