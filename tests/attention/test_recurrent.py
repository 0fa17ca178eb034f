"""The gated delta rule in chunks is that token by token; slices, mates and checkpoints leave the right states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beheld.attention.backend import AttnMetadata, GroupMetadata, StateOf
from beheld.attention.context import ForwardContext, forward_context
from beheld.attention.gated_delta import GatedDelta
from beheld.attention.recurrent import LayerStates, recur
from beheld.core.errors import ModelError

RULE = GatedDelta(key_heads=2, key_dim=8, value_heads=4, value_dim=6)
CHANNELS = 2 * 2 * 8 + 4 * 6
LENGTH, SIZE = 4, 4


def given(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, decays (some near 1, some near 0) and rates of writing of `count` tokens."""
    made = torch.Generator().manual_seed(seed)
    x_TC = torch.randn(count, CHANNELS, generator=made)
    g_TH = -torch.rand(count, 4, generator=made).pow(4) * 8
    return x_TC, g_TH, torch.rand(count, 4, generator=made)


def by_hand(state_HKV: Tensor, x_TC: Tensor, g_TH: Tensor, beta_TH: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64 and without in-place changes: outputs (T, H, V) and the last state."""
    state, out = state_HKV.double(), []
    for x_C, g_H, beta_H in zip(x_TC.double(), g_TH.double(), beta_TH.double(), strict=True):
        q_JK, k_JK = (each.view(2, 8) / (each.view(2, 8).square().sum(1, keepdim=True) + 1e-6).sqrt()
                      for each in (x_C[:16], x_C[16:32]))  # fmt: skip
        heads = []
        for head in range(4):
            q, k, v = q_JK[head // 2] / 8**0.5, k_JK[head // 2], x_C[32:].view(4, 6)[head]
            decayed = state[head] * g_H[head].exp()
            heads.append(decayed + torch.outer(k, beta_H[head] * (v - k @ decayed)))
            out.append(q @ heads[-1])
        state = torch.stack(heads)
    return torch.stack(out).view(len(x_TC), 4, 6), state


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_chunks_are_the_definition(count: int) -> None:
    more = given(count)
    state = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(5))
    out, last = by_hand(state, *more)
    found = RULE.scan(state, *more)
    torch.testing.assert_close(found.double(), out, rtol=0, atol=2e-5)
    torch.testing.assert_close(state.double(), last, rtol=0, atol=2e-5)


def test_a_step_is_the_definition() -> None:
    states = torch.randn(3, 4, 8, 6, generator=torch.Generator().manual_seed(6))
    more = given(3, seed=1)
    wanted = [by_hand(states[row], *(each[row : row + 1] for each in more)) for row in range(3)]
    found = RULE.step(states, *more)
    for row, (out, last) in enumerate(wanted):
        torch.testing.assert_close(found[row].double(), out[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(states[row].double(), last, rtol=0, atol=1e-5)


def layer(num_blocks: int = 12) -> LayerStates:
    """A layer's cache full of what belongs to nobody."""
    states = torch.full((num_blocks, 4, 8, 6), torch.nan)
    return LayerStates(states, torch.full((num_blocks, LENGTH - 1, CHANNELS), torch.nan), 0)


def run(cache: LayerStates, slices: list[tuple[int, int, list[int]]], seeds: list[int]) -> list[Tensor]:
    """One step of sequences (start, stop, table), those of one token first; outputs of each."""
    tables = np.zeros((len(slices), max(len(table) for *_, table in slices)), dtype=np.int32)
    for row, (*_, table) in enumerate(slices):
        tables[row, : len(table)] = table
    counts = [stop - start for start, stop, _ in slices]
    slots = [table[p // SIZE] * SIZE + p % SIZE for start, stop, table in slices for p in range(start, stop)]
    metadata = AttnMetadata(
        num_decodes=sum(count == 1 for count in counts),
        starts=tuple(start for start, *_ in slices),
        lengths=tuple(stop for _, stop, _ in slices),
        lengths_B=torch.tensor([stop for _, stop, _ in slices], dtype=torch.int32),
        cu_q_B1=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        groups=(GroupMetadata(torch.tensor(slots), torch.from_numpy(tables), None),),
        block_size=SIZE,
        tables=(tables,),
    )
    inputs = [
        [each[start:stop] for each in given(40, seed)] for (start, stop, _), seed in zip(slices, seeds, strict=True)
    ]
    x_TC, g_TH, beta_TH = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    backend: Any = None
    with forward_context(ForwardContext(backend, metadata, {StateOf(3): cache})):
        out = recur(3, x_TC, WEIGHT, None, lambda y: (nn.functional.silu(y), g_TH, beta_TH), RULE)
    return list(out.split(counts))


WEIGHT = torch.randn(CHANNELS, LENGTH, generator=torch.Generator().manual_seed(9))


def whole(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Outputs and last state of a sequence's first tokens, computed at once by hand."""
    x_TC, g_TH, beta_TH = (each[:count] for each in given(40, seed))
    padded = nn.functional.pad(x_TC, (0, 0, LENGTH - 1, 0)).double()
    mixed = torch.stack([(padded[t : t + LENGTH] * WEIGHT.double().t()).sum(0) for t in range(count)])
    return by_hand(torch.zeros(4, 8, 6), nn.functional.silu(mixed), g_TH, beta_TH)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)


def test_a_prompt_cut_anywhere_among_mates() -> None:
    """Two sequences in one batch, one cut after 1, 7 and 8 tokens, the other decoding beside it."""
    cache, first, second = layer(), [], []
    first += run(cache, [(0, 1, [1])], [0])
    second += run(cache, [(0, 9, [2, 2, 2])], [1])
    for start, stop, at in ((1, 7, 9), (7, 8, 10), (8, 21, 11)):
        # The state's block moves along: it stands at every entry since it was given.
        own = (start, stop, [1] * 6)
        mate = (at, at + 1, [2, 2, 2])
        order = [own, mate] if stop - start == 1 else [mate, own]
        out = run(cache, order, [0, 1] if order[0] is own else [1, 0])
        first.append(out[order.index(own)])
        second.append(out[order.index(mate)])
    for outputs, seed, count, block in ((first, 0, 21, 1), (second, 1, 12, 2)):
        out, state = whole(seed, count)
        same(torch.cat(outputs), out)
        same(cache.states[block], state)


def test_checkpoints_are_the_states_at_the_ends_of_blocks() -> None:
    cache = layer()
    run(cache, [(0, 6, [0, 1])], [0])
    (out,) = run(cache, [(6, 19, [0, 1, 4, 0, 7])], [0])
    wanted, state = whole(0, 19)
    same(out, wanted[6:])
    same(cache.states[7], state)
    for block, stop in ((1, 8), (4, 12)):
        same(cache.states[block], whole(0, stop)[1])
        # Another sequence goes on from there, with what it says itself.
        x_TC = given(40, 0)[0]
        torch.testing.assert_close(cache.inputs[block], x_TC[stop - LENGTH + 1 : stop])
    (again,) = run(cache, [(12, 19, [0, 0, 4, 9, 9])], [0])
    same(again, wanted[12:])
    same(cache.states[4], whole(0, 12)[1])


def test_padding_and_first_tokens_read_nothing() -> None:
    """Blocks that were never written hold anything; padding writes to the null block alone."""
    cache = layer()
    (out, padding) = run(cache, [(0, 1, [3]), (0, 1, [0])], [0, 1])
    same(out, whole(0, 1)[0])
    assert padding.isfinite().all()
    assert cache.states[[1, 2, *range(4, 12)]].isnan().all()


def test_decoding_reads_nothing_back_from_the_device() -> None:
    """On the stand-in (meta) a number that is read raises; so a graph can hold the step."""
    cache = layer()
    cache.states, cache.inputs = cache.states.to("meta"), cache.inputs.to("meta")
    counts = [torch.zeros(size, dtype=torch.int32, device="meta") for size in (3, 4)]
    group = GroupMetadata(
        torch.zeros(3, dtype=torch.int64, device="meta"), torch.zeros(3, 5, dtype=torch.int32, device="meta"), None
    )
    metadata = AttnMetadata(3, (0,) * 3, (1,) * 3, *counts, (group,), SIZE)
    backend: Any = None
    x_TC, g_TH, beta_TH = (each.to("meta") for each in given(3))
    with forward_context(ForwardContext(backend, metadata, {StateOf(3): cache})):
        out = recur(3, x_TC, WEIGHT.to("meta"), None, lambda y: (nn.functional.silu(y), g_TH, beta_TH), RULE)
    assert out.shape == (3, 4, 6)


def test_a_layer_without_states_is_named() -> None:
    nothing: Any = None
    context = ForwardContext(nothing, nothing, {})
    with forward_context(context), pytest.raises(ModelError, match="layer 3, which has no states"):
        recur(3, torch.zeros(1, CHANNELS), WEIGHT, None, lambda y: (y,), RULE)
