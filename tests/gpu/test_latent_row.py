"""Layers of latent attention for a single row on a GPU: in chains of kernels that start early, and in an engine."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.attention.backend import LayerLatent
from beheld.attention.latent import LatentTurn, turned
from beheld.attention.triton_paged import TritonBackend
from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.models.load import load_model
from beheld.models.normed_row_kernel import normed_row
from beheld.models.one_row import OneRowLinear, early_start
from beheld.models.shared_expert_kernel import inner, outer
from beheld.models.surgery.expert_row import use_expert_rows
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.latent import pass_latents_on
from beheld.models.surgery.latent_row_layer import LatentRowLayer, latent_form
from beheld.models.surgery.linears import replace_linears
from beheld.models.surgery.one_row_layer import layers_of_forms, probed_latents
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.route_row import use_row_routers
from benchmarks.attention import BLOCK, metadata_of
from tests import tiny
from tests.gpu.row_answers import same_answers
from tests.gpu.test_one_row import check_in_a_graph

DEVICE = torch.device("cuda")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.double() - want.double()).norm() <= 4e-3 * want.double().norm()


@pytest.mark.parametrize(("outputs", "inputs"), [(1344, 2048), (5120, 768), (64, 2048), (2112, 4096), (24576, 1536)])
def test_products_of_a_normalized_row(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    x_K, norm_K, weight_NK = random(inputs), random(inputs), random(outputs, inputs)
    normed_K = torch.empty_like(x_K)
    got_N = normed_row(x_K, norm_K, 1e-6, weight_NK, None, from_one=False, early=early_start(DEVICE), normed_K=normed_K)
    scaled_K = (x_K.float() * torch.rsqrt(x_K.float().pow(2).mean() + 1e-6)).bfloat16() * norm_K
    close(normed_K, scaled_K)
    close(got_N, weight_NK.double() @ scaled_K.double())


# GLM-4.7-Flash's, DeepSeek-V3's (experts fewer), and one whose shared expert is twice as large.
@pytest.mark.parametrize(
    ("hidden", "units", "shared", "choices"), [(2048, 1536, 1536, 4), (7168, 2048, 2048, 8), (2048, 1408, 2816, 6)]
)
def test_experts_with_one_that_every_row_takes(hidden: int, units: int, shared: int, choices: int) -> None:
    torch.manual_seed(0)
    experts = 12
    up_EDH, down_EHI = random(experts, 2 * units, hidden), random(experts, hidden, units)
    shared_DH, shared_HS = random(2 * shared, hidden), random(hidden, shared)
    x_H, residual_H = random(hidden) / hidden**0.5, random(hidden)
    choice_C = torch.randperm(experts, device=DEVICE)[:choices]
    share_C = torch.rand(choices, device=DEVICE)
    early = early_start(DEVICE)

    def chain() -> torch.Tensor:
        y_H = x_H
        for _ in range(4):
            gated = inner(y_H, up_EDH, shared_DH, choice_C, tanh=False, early=early)
            y_H = outer(gated, down_EHI, shared_HS, choice_C, share_C, residual_H, early=early) / hidden
        return y_H

    def gated_by(weight_DH: torch.Tensor) -> torch.Tensor:
        gate, up = (weight_DH.double() @ x_H.double()).bfloat16().chunk(2)
        return torch.nn.functional.silu(gate) * up

    both = [gated_by(shared_DH), *(gated_by(up_EDH[int(expert)]) for expert in choice_C)]
    got = inner(x_H, up_EDH, shared_DH, choice_C, tanh=False, early=early)
    close(got, torch.cat(both))
    want_H = residual_H.double() + shared_HS.double() @ both[0].double()
    for share, expert, gated in zip(share_C, choice_C, both[1:], strict=True):
        want_H += share * (down_EHI[int(expert)].double() @ gated.double())
    close(outer(got, down_EHI, shared_HS, choice_C, share_C, residual_H, early=early), want_H)
    check_in_a_graph(chain, chain())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 500, 4097, 33000])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_a_row_is_turned_and_stored_in_the_launch_that_absorbs_it(heads: int, length: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    rank, rotary, plain, values = 512, 64, 192, 256
    blocks = length // BLOCK + 2
    cache = random(blocks, BLOCK, rank + rotary)
    kv, other = LayerLatent(cache.clone(), rank, 0), LayerLatent(cache.clone(), rank, 0)
    q_HC, latent_W, up_HDR = random(heads, plain + rotary), random(rank + rotary), random(heads, plain + values, rank)
    up_HDR *= rank**-0.5
    angles = torch.randn(rotary // 2, device=DEVICE).repeat(2)
    turn = LatentTurn(random(rank), 1e-6, angles.cos().bfloat16(), angles.sin().bfloat16(), interleaved)
    metadata, backend = metadata_of([length - 1], [length]), TritonBackend()
    scale = (plain + rotary) ** -0.5

    def row() -> torch.Tensor:
        backend.begin(metadata)
        for _ in range(3):
            out_HV = backend.attend_latent_row(q_HC, latent_W, turn, up_HDR, kv, metadata, scale)
        return out_HV

    q_1HC, latent_1W = turned(q_HC[None], latent_W[None], turn)
    backend.begin(metadata)
    want_HV = backend.attend_latent(q_1HC, latent_1W, up_HDR, other, metadata, scale)[0]
    got_HV = row()
    close(got_HV, want_HV)
    close(kv.latents, other.latents)
    check_in_a_graph(row, got_HV)


@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v3"])
def test_layers_by_our_kernels_are_the_originals(family: str) -> None:
    """In a chain whose kernels all begin as early as they can, each finds what all before it have written."""
    config = EngineArgs(model=str(tiny.checkpoint(family)), dtype="bfloat16", device="cuda")
    resolved = resolve_and_decide(config)
    text = text_model(load_model(resolved.hf_config, resolved.info, resolved.config).target.model)
    changes = Changes()
    assert pass_latents_on(text, changes)
    fuse_linears(text, changes)
    replace_linears(text, OneRowLinear, torch.bfloat16, changes)
    assert use_expert_rows(text, changes, RankTrial(None))
    assert use_row_routers(text, torch.bfloat16, changes, RankTrial(None))
    # Each is compared with the original as it is found.
    found = layers_of_forms(text, [latent_form])
    assert len(found) == len(text.layers)
    layers = [found[layer] for layer in text.layers]
    rotary = text.layers[0].self_attn.qk_rope_head_dim
    for layer in layers:
        assert isinstance(layer, LatentRowLayer)
        layer.attend = _attend(layer)
    x = torch.randn(1, 1, text.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(1, 1, rotary // 2, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def chain() -> torch.Tensor:
        y = x
        for layer in layers * 8:
            y = layer(y, position_embeddings=(cos, sin))
        return y

    with torch.inference_mode():
        want = x
        for layer in layers * 8:
            want = layer(want, position_embeddings=(cos, sin))
            torch.cuda.synchronize()
        check_in_a_graph(chain, want)


def _attend(made: LatentRowLayer) -> object:
    def attend(
        layer: int, q_HC: torch.Tensor, latent_W: torch.Tensor, turn: LatentTurn, up_HDR: torch.Tensor, scale: float
    ) -> torch.Tensor:
        q_1HC, latent_1W = turned(q_HC.unsqueeze(0), latent_W.unsqueeze(0), turn)
        return probed_latents(q_1HC.transpose(0, 1).unsqueeze(0), latent_1W[None, None], made.up, scale)[0, 0]

    return attend


@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v3"])
def test_an_engine_uses_the_form(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its greedy answers are those of the layers as compiled, in bfloat16."""
    calls: list[int] = []
    plain = TritonBackend.attend_latent_row
    monkeypatch.setattr(
        TritonBackend, "attend_latent_row", lambda self, *given: (calls.append(1), plain(self, *given))[1]
    )
    same_answers(family, "BEHELD_LATENT_ROWS", monkeypatch, calls)
