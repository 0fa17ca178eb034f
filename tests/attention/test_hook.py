"""The attention hook: what it refuses, and that one compiled layer serves all layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld.attention.backend import GroupMetadata
from beheld.attention.context import ForwardContext, forward_context
from beheld.attention.hook import paged_attention
from beheld.attention.op import number_layers
from beheld.attention.torch_ref import TorchBackend
from beheld.core.errors import ModelError
from tests.attention.naive import Case, expected, make_case, sinks

PIECES = [(7, 8), (0, 9), (5, 21)]


class Layer(torch.nn.Module):
    """The least that calls attention as transformers' layers do."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        out, _ = paged_attention(self, q, k, v, None, scaling=0.3, **options)
        return out * 2


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in (case.q_THC, case.k_TKC, case.v_TKC))


def context_of(*cases: Case) -> ForwardContext:
    """Layer i is case i's; each has a group of its own."""
    metadata = cases[0].metadata
    metadata.groups = tuple(
        GroupMetadata(g.slots_T, g.tables_BN, g.window) for g in (case.metadata.groups[0] for case in cases)
    )
    for index, case in enumerate(cases):
        case.kv.group = index
    backend = TorchBackend()
    backend.begin(metadata)
    return ForwardContext(backend, metadata, {index: case.kv for index, case in enumerate(cases)})


def test_refuses_what_the_cache_was_not_made_for() -> None:
    case = make_case(PIECES)
    with forward_context(context_of(case)):
        with pytest.raises(ModelError, match="layer 7"):
            Layer(7)(*inputs(case))
        with pytest.raises(ModelError, match="window 4"):
            Layer(0)(*inputs(case), sliding_window=4)
        q, k, v = inputs(case)
        with pytest.raises(
            ModelError, match=r"4 key-value heads of 16 and 16 numbers, but .* 2 key-value heads of 16 and 16"
        ):
            Layer(0)(q, k.repeat(1, 2, 1, 1), v)
        with pytest.raises(ModelError, match="2 key-value heads of 16 and 8 numbers, but"):
            Layer(0)(q, k, v[..., :8])
        with pytest.raises(ModelError, match="position_bias"):
            Layer(0)(*inputs(case), position_bias=torch.ones(4))
        with pytest.raises(ModelError, match="layer index"):
            paged_attention(torch.nn.Linear(1, 1), *inputs(case), None)


def test_s_aux_are_the_heads_sinks() -> None:
    case, own = make_case(PIECES), sinks(4)
    with forward_context(context_of(case)):
        out = Layer(0)(*inputs(case), s_aux=own)[0] / 2
    torch.testing.assert_close(out.double(), expected(case, 0.3, None, own), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sunk", [False, True], ids=["plain", "sinks"])
def test_one_compiled_layer_serves_all_layers(sunk: bool) -> None:
    cases = [make_case(PIECES, seed=seed) for seed in range(3)]
    aux = [None, None, None] if not sunk else [seed * sinks(4) for seed in range(3)]
    layers = torch.nn.ModuleList(Layer(index) for index in range(3))
    context = context_of(*cases)
    with forward_context(context):
        plain = [layer(*inputs(case), s_aux=own) for layer, case, own in zip(layers, cases, aux, strict=True)]
    assert number_layers(layers) == 3
    graphs = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in layers:
        layer.compile(backend=compiler, fullgraph=True)
    with forward_context(context_of(*cases)) as context:
        compiled = [layer(*inputs(case), s_aux=own) for layer, case, own in zip(layers, cases, aux, strict=True)]
    assert len(graphs) == 1, "the layers' numbers were compiled in"
    assert context.called == {0: 1, 1: 1, 2: 1}
    for a, b in zip(plain, compiled, strict=True):
        assert torch.equal(a, b)
