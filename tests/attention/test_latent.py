"""Latent attention of the CPU backend against keys and values of all heads, written out plainly."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from beheld.attention.backend import AttnMetadata, GroupMetadata
from beheld.attention.context import ForwardContext, Tail, forward_context
from beheld.attention.hook import paged_attention
from beheld.attention.latent import LatentTurn, LatentUp, absorbs, turned
from beheld.attention.torch_ref import TorchBackend
from beheld.core.errors import ModelError
from tests.attention.naive import LatentCase, make_latent_case

DECODES = [(0, 1), (5, 6), (8, 9), (40, 41)]
MIXED = [(7, 8), (31, 32), (0, 9), (5, 21), (16, 24), (30, 33)]
SHAPES = [
    {},
    {"heads": 5, "rank": 16, "rotary": 4, "plain": 6, "values": 14},
    {"heads": 1, "rank": 8, "rotary": 16, "plain": 20, "values": 3},
]


def attend(case: LatentCase) -> torch.Tensor:
    backend = TorchBackend()
    backend.begin(case.metadata)
    return backend.attend_latent(case.q_THC, case.latent_TW, case.up_HDR, case.kv, case.metadata, 0.3)


@pytest.mark.parametrize("pieces", [DECODES, MIXED, [(0, 33)], [(12, 13)]], ids=["decodes", "mixed", "prefill", "one"])
@pytest.mark.parametrize("shape", SHAPES, ids=["", "odd", "wide"])
@pytest.mark.parametrize("way", [True, False], ids=["absorbed", "expanded"])
def test_equals_naive(
    pieces: list[tuple[int, int]], shape: dict[str, int], way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beheld.attention.torch_ref.absorbs", lambda *_: way)
    case = make_latent_case(pieces, **shape)
    out = attend(case)
    torch.testing.assert_close(out.double(), case.expected(0.3), atol=3e-6, rtol=2e-5)
    slots = case.metadata.groups[0].slots_T
    assert torch.equal(case.kv.latents.flatten(0, 1)[slots], case.latent_TW)
    assert (case.kv.latents[0] == 0).all(), "the null block stays empty"


def test_a_row_is_turned_first() -> None:
    """As any other backend is given one: see models/surgery/latent_row_layer.py."""
    case, other = make_latent_case([(20, 21)]), make_latent_case([(20, 21)])
    angles = torch.arange((case.latent_TW.shape[1] - case.kv.rank) // 2).float().repeat(2)
    turn = LatentTurn(torch.full((case.kv.rank,), 1.5), 1e-5, angles.cos(), angles.sin(), True)
    other.q_THC, other.latent_TW = turned(other.q_THC, other.latent_TW, turn)
    backend = TorchBackend()
    backend.begin(case.metadata)
    given = case.q_THC[0], case.latent_TW[0], turn, case.up_HDR, case.kv, case.metadata, 0.3
    out_HV = backend.attend_latent_row(*given)
    assert torch.equal(out_HV[None], attend(other))
    assert torch.equal(case.kv.latents.nan_to_num(), other.kv.latents.nan_to_num())


def test_the_cheaper_way_is_taken() -> None:
    """DeepSeek-V2-Lite: 512 + 64 numbers of a latent, heads of 128 + 64 and 128."""
    up_HDR = torch.empty(16, 256, 512, device="meta")
    absorbed, expanded = 576 + 512, 192 + 128
    for count in (1, 100, 170, 171, 1000):
        cheaper = count * absorbed <= count * expanded + 512 * 256
        assert absorbs(count, 192, up_HDR, 576) == cheaper
    assert not absorbs(171, 192, up_HDR, 576)


def test_ranges_read_both_ways() -> None:
    case, same = make_latent_case([(0, 20), (4, 12)]), make_latent_case([(0, 20), (4, 12)])
    causal = attend(case)
    same.metadata.both_ways = (((3, 9),), ())
    both = attend(same)
    assert torch.equal(causal[20:], both[20:])
    assert not torch.allclose(causal[3:8], both[3:8])
    torch.testing.assert_close(causal[9:20], both[9:20])


def test_steps_of_the_same_sequences_read_dense_copies() -> None:
    """Three decoding sequences, ten steps, in a cache with room for many more."""
    rounds, lengths = 10, (3, 17, 9)
    case = make_latent_case([*((0, n + rounds) for n in lengths), (0, 500)])
    backend, dense = TorchBackend(), 0
    backend.begin(case.metadata)
    backend.store_latent(case.latent_TW, case.kv, case.metadata)
    want, bounds = case.expected(0.3), case.metadata.cu_q_B1.tolist()
    tables_BN = case.metadata.groups[0].tables_BN[:3]
    for step in range(rounds):
        rows = torch.tensor([bounds[b] + n + step for b, n in enumerate(lengths)])
        group = GroupMetadata(case.metadata.groups[0].slots_T[rows], tables_BN, None)
        known = tuple(n + step + 1 for n in lengths)
        metadata = AttnMetadata(
            num_decodes=3,
            starts=tuple(n - 1 for n in known),
            lengths=known,
            lengths_B=torch.tensor(known).int(),
            cu_q_B1=torch.arange(4).int(),
            groups=(group,),
            block_size=case.metadata.block_size,
            sequences=(1, 2, 3),
        )
        backend.begin(metadata)
        out = backend.attend_latent(case.q_THC[rows], case.latent_TW[rows], case.up_HDR, case.kv, metadata, 0.3)
        torch.testing.assert_close(out.double(), want[rows], atol=3e-6, rtol=2e-5)
        dense += "decode" not in group.extra
    assert dense == rounds - 1


class Layer(torch.nn.Module):
    """The least that calls attention as layers with latents do."""

    def __init__(self, layer_idx: int, case: LatentCase) -> None:
        super().__init__()
        self.layer_idx, self.layer_number = layer_idx, torch.tensor(layer_idx)
        self.kv_b_proj = LatentUp(case.up_HDR.flatten(0, 1), case.up_HDR.shape[0])

    def forward(self, q: torch.Tensor, latent: torch.Tensor, **options: object) -> torch.Tensor:
        out, _ = paged_attention(self, q, latent, latent[..., : self.kv_b_proj.weight.shape[1]], None, 0.3, **options)
        return out * 2


def inputs(case: LatentCase) -> tuple[torch.Tensor, torch.Tensor]:
    return case.q_THC.transpose(0, 1).unsqueeze(0), case.latent_TW[None, None]


def context_of(case: LatentCase) -> ForwardContext:
    backend = TorchBackend()
    backend.begin(case.metadata)
    return ForwardContext(backend, case.metadata, {0: case.kv})


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_the_hook_passes_latents_on(compiled: bool) -> None:
    case = make_latent_case(MIXED)
    layer = Layer(0, case)
    if compiled:
        torch.compiler.reset()
        layer.compile(backend="eager", fullgraph=True)
    with forward_context(context_of(case)) as context:
        out = layer(*inputs(case))[0] / 2
    assert context.called == {0: 1}
    torch.testing.assert_close(out.double(), case.expected(0.3), atol=3e-6, rtol=2e-5)


def test_the_hook_refuses_what_latents_were_not_made_for() -> None:
    case = make_latent_case(MIXED)
    with forward_context(context_of(case)):
        with pytest.raises(ModelError, match="layer 7"):
            Layer(7, case)(*inputs(case))
        q, latent = inputs(case)
        with pytest.raises(ModelError, match="layer 0, which has no such latents"):
            Layer(0, case)(q, latent[..., :-1])
        for option in ({"sliding_window": 4}, {"softcap": 2.0}, {"s_aux": torch.ones(4)}):
            with pytest.raises(ModelError, match="latents with a window, a soft cap or sinks"):
                Layer(0, case)(q, latent, **option)


def test_a_tail_stores_all_and_attends_for_its_rows() -> None:
    case = make_latent_case([(0, 1), (0, 20), (5, 21)])
    context = context_of(case)
    rows = torch.tensor([0, 20, 36])
    group = dataclasses.replace(case.metadata.groups[0], slots_T=case.metadata.groups[0].slots_T[rows], extra={})
    metadata = dataclasses.replace(
        case.metadata,
        num_decodes=3,
        starts=tuple(n - 1 for n in case.metadata.lengths),
        cu_q_B1=torch.arange(4).int(),
        groups=(group,),
        stored=True,
    )
    context.backend.begin(metadata)
    context.tail = Tail(0, rows, metadata, storing=True)
    layer, (q, latent) = Layer(0, case), inputs(case)
    with forward_context(context):
        assert not layer(q, latent).any()
        assert context.tail.stored
        assert context.called == {}
        context.tail.storing = False
        out = layer(q[:, :, rows], latent[:, :, rows])[0] / 2
    torch.testing.assert_close(out.double(), case.expected(0.3)[rows], atol=3e-6, rtol=2e-5)
