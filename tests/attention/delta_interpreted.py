"""The Triton kernels of the gated delta rule in Triton's interpreter; test_triton.py runs this file in its own
process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from beheld.attention.backend import AttnMetadata, GroupMetadata, StateOf
from beheld.attention.context import ForwardContext, forward_context
from beheld.attention.delta_rule import delta_rule
from beheld.attention.gated_delta import GatedDelta
from beheld.attention.recurrent import LayerStates, recur
from beheld.attention.torch_ref import TorchBackend
from beheld.attention.triton_paged import TritonBackend
from tests.long import LONG

BLOCK_SIZE, LENGTH = 8, 4
SMALL, ODD = GatedDelta(1, 16, 2, 16), GatedDelta(2, 12, 4, 40)


class Module:
    """What `delta_rule` reads of a mixer."""

    layer_idx = 3


def layer(rule: GatedDelta, num_blocks: int) -> LayerStates:
    """A layer's cache: the null block is empty, the others hold states of earlier sequences."""
    made = torch.Generator().manual_seed(1)
    states = torch.randn(num_blocks, rule.value_heads, rule.key_dim, rule.value_dim, generator=made)
    inputs = torch.randn(num_blocks, LENGTH - 1, channels(rule), generator=made)
    states[0], inputs[0] = 0, 0
    return LayerStates(states, inputs, 0)


def channels(rule: GatedDelta) -> int:
    """Numbers of q, k and v of a token."""
    return 2 * rule.key_heads * rule.key_dim + rule.value_heads * rule.value_dim


def metadata_of(slices: list[tuple[int, int, list[int]]]) -> AttnMetadata:
    """A step of sequences (start, stop, table), those of one token first."""
    tables = np.zeros((len(slices), max(len(table) for *_, table in slices)), dtype=np.int32)
    for row, (*_, table) in enumerate(slices):
        tables[row, : len(table)] = table
    counts = [stop - start for start, stop, _ in slices]
    slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for a, b, table in slices for p in range(a, b)]
    return AttnMetadata(
        num_decodes=sum(count == 1 for count in counts),
        starts=tuple(start for start, *_ in slices),
        lengths=tuple(stop for _, stop, _ in slices),
        lengths_B=torch.tensor([stop for _, stop, _ in slices], dtype=torch.int32),
        cu_q_B1=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        groups=(GroupMetadata(torch.tensor(slots), torch.from_numpy(tables), None),),
        block_size=BLOCK_SIZE,
        tables=(tables,),
    )


def both(
    rule: GatedDelta, slices: list[tuple[int, int, list[int]]], num_blocks: int = 40, *, bias: bool = False
) -> None:
    """Compute a step by the kernels and by torch: outputs, states and kept inputs must be the same."""
    metadata, made = metadata_of(slices), torch.Generator().manual_seed(2)
    count, width, heads = len(metadata.groups[0].slots_T), channels(rule), rule.value_heads
    # Strided, as parts of a joined product are.
    x_TC = torch.randn(count, width + 5, generator=made)[:, :width]
    g_TH = (-torch.rand(count, heads + 1, generator=made).pow(4) * 8)[:, :heads]
    beta_TH = torch.rand(count, heads, generator=made)
    weight_CL = torch.randn(width, LENGTH, generator=made)
    bias_C = torch.randn(width, generator=made) if bias else None
    found: list[Tensor] = []
    caches = [layer(rule, 40), layer(rule, 40)]
    for backend, cache in zip((TorchBackend(), TritonBackend()), caches, strict=True):
        metadata.groups[0].extra.clear()
        with forward_context(ForwardContext(backend, metadata, {StateOf(3): cache})):
            found.append(delta_rule(Module(), x_TC, g_TH, beta_TH, weight_CL, bias_C, rule))
    close = {"rtol": 2e-4, "atol": 2e-4}
    torch.testing.assert_close(found[1], found[0], **close)
    torch.testing.assert_close(caches[1].states[1:], caches[0].states[1:], **close)
    torch.testing.assert_close(caches[1].inputs[1:], caches[0].inputs[1:], **close)


STEPS = {
    "decodes": [(0, 1, [3]), (9, 10, [0, 5]), (8, 9, [6, 7]), (17, 18, [0, 8, 8])],
    # Kept at the ends of two blocks, and the newest in the place of the one that it continues.
    "prompt": [(0, 21, [4, 5, 6])],
    "goes on": [(6, 19, [9, 2, 9])],
    "short": [(7, 9, [9, 9])],
    "mixed": [(9, 10, [0, 5]), (0, 2, [11]), (3, 30, [12, 13, 0, 12])],
    "long": [(0, 150, [*range(1, 20)])],
}
SLOW = {"long", "mixed"}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rule", [SMALL, ODD] if LONG else [ODD], ids=lambda rule: f"{rule.key_dim}x{rule.value_dim}")
def test_equals_torch(step: str, rule: GatedDelta) -> None:
    both(rule, STEPS[step])


def test_one_state_alone_is_kept() -> None:
    """A prompt of several chunks without checkpoints."""
    both(SMALL, [(0, 70, [0] * 8 + [3])], bias=True)


def test_padding_writes_nothing() -> None:
    """Rows that fill up a graph: length 1, the null block."""
    cache, rule = layer(SMALL, 4), SMALL
    states, inputs = cache.states.clone(), cache.inputs.clone()
    metadata = metadata_of([(0, 1, [0]), (0, 1, [0])])
    x_TC, rates_TH = torch.randn(2, channels(rule)), torch.rand(2, 2)
    with forward_context(ForwardContext(TritonBackend(), metadata, {StateOf(3): cache})):
        out = delta_rule(Module(), x_TC, -rates_TH, rates_TH, torch.ones(channels(rule), LENGTH), None, rule)
    assert out.isfinite().all()
    assert torch.equal(cache.states, states)
    assert torch.equal(cache.inputs, inputs)


def test_without_kernels_it_is_the_recurrence() -> None:
    """The CPU's way, whose parts test_recurrent.py compares; each pass counts the layer's call once."""
    metadata, rule = metadata_of([(0, 9, [1, 2])]), SMALL
    x_TC, rates_TH = torch.randn(9, channels(rule)), torch.rand(9, 2)
    weight_CL = torch.randn(channels(rule), LENGTH)
    backends = (TorchBackend(), TritonBackend())
    contexts = [ForwardContext(each, metadata, {StateOf(3): layer(rule, 4)}) for each in backends]
    for context in contexts:
        with forward_context(context):
            out = delta_rule(Module(), x_TC, -rates_TH, rates_TH, weight_CL, None, rule)
        assert context.called == {StateOf(3): 1}
    cache, silu = layer(rule, 4), nn.functional.silu
    with forward_context(ForwardContext(TorchBackend(), metadata, {StateOf(3): cache})):
        wanted = recur(3, x_TC, weight_CL, None, lambda y_TC: (silu(y_TC), -rates_TH, rates_TH), rule)
    torch.testing.assert_close(out, wanted, rtol=2e-4, atol=2e-4)
