"""Experts on a GPU: a single row of every size, also in a chain of kernels that start early, and many rows."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from torch import Tensor

from beheld.models.surgery import expert_row as _expert_row  # noqa: F401 (defines operators)
from beheld.models.surgery.experts import grouped
from beheld.quant.mxfp4_experts import dequantized, repacked

CLOSE = 3e-3


def numbers(*sizes: int, seed: int = 0) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sizes, generator=made, device="cuda").to(torch.bfloat16)


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got.double() - want).norm() <= CLOSE * want.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "units"), [(2048, 1536), (2880, 2880), (40, 24), (5120, 1000), (7168, 2048)])
def test_equals_float64(hidden: int, units: int, bias: bool) -> None:
    up, down = numbers(6, units, hidden, seed=1), numbers(6, hidden, units, seed=2)
    up_bias, down_bias = (numbers(6, n, seed=3) if bias else None for n in (units, hidden))
    x, inner = numbers(1, hidden, seed=4), numbers(4, units, seed=5)
    choices, shares = torch.tensor([[5, 0, 3, 6]], device="cuda"), torch.rand(1, 4, device="cuda")
    got = torch.ops.beheld.expert_row_inner(x, up, up_bias, choices)
    for row, expert in zip(got[:3], (5, 0, 3), strict=True):
        assert close(row, up[expert].double() @ x[0].double() + (0 if up_bias is None else up_bias[expert].double()))
    want = torch.zeros(hidden, dtype=torch.float64, device="cuda")
    for place, expert in enumerate((5, 0, 3)):
        own = down[expert].double() @ inner[place].double() + (0 if down_bias is None else down_bias[expert].double())
        want += shares[0, place].double() * own
    assert close(torch.ops.beheld.expert_row_outer(inner, down, down_bias, choices, shares)[0], want)


@pytest.mark.parametrize(("outputs", "inputs"), [(5760, 2880), (2880, 2880), (48, 32), (4096, 2048)])
def test_mxfp4_equals_float64(outputs: int, inputs: int) -> None:
    made = torch.Generator("cuda").manual_seed(inputs)
    sizes = 4, outputs, inputs // 32
    blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=made, device="cuda")
    scales = torch.randint(110, 130, sizes, dtype=torch.uint8, generator=made, device="cuda")
    scales[0, 0, 0] = 0
    stored, meant = repacked(blocks, scales), dequantized(blocks, scales)
    bias, x = numbers(4, outputs, seed=1), numbers(3, inputs, seed=2)
    choices, shares = torch.tensor([[3, 0, 4]], device="cuda"), torch.rand(1, 3, device="cuda")
    rows = [x[place].double() @ meant[expert].double() + bias[expert].double() for place, expert in enumerate((3, 0))]
    for place in range(2):
        assert close(torch.ops.beheld.mxfp4_row(x[place : place + 1], *stored, bias, choices, None)[place], rows[place])
    want = shares[0, 0].double() * rows[0] + shares[0, 1].double() * rows[1]
    assert close(torch.ops.beheld.mxfp4_row(x, *stored, bias, choices, shares)[0], want)


def test_choices_are_read_only_when_they_are_there() -> None:
    """Replayed: each layer's router reads the former layer's result, and other kernels start early around it."""
    up, down, router = numbers(8, 1536, 1024, seed=1), numbers(8, 1024, 768, seed=2), numbers(8, 1024, seed=3)

    def chain(x: Tensor) -> Tensor:
        for _ in range(6):
            weights, choices = torch.ops.beheld.one_row_linear(x, router, None).softmax(-1).topk(2)
            gate, inner = torch.ops.beheld.expert_row_inner(x, up, None, choices).chunk(2, -1)
            x = torch.ops.beheld.expert_row_outer((gate.sigmoid() * inner), down, None, choices, weights)
            x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        return x

    first = numbers(1, 1024, seed=4)
    chain(first)
    graph, given = torch.cuda.CUDAGraph(), first.clone()
    with torch.cuda.graph(graph):
        out = chain(given)
    for seed in range(30):
        given.copy_(numbers(1, 1024, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        # One kernel after the other.
        want = given
        for _ in range(6):
            weights, choices = torch.ops.beheld.one_row_linear(want, router, None).softmax(-1).topk(2)
            torch.cuda.synchronize()
            gate, inner = torch.ops.beheld.expert_row_inner(want, up, None, choices).chunk(2, -1)
            gated = gate.sigmoid() * inner
            torch.cuda.synchronize()
            want = torch.ops.beheld.expert_row_outer(gated, down, None, choices, weights)
            want = torch.nn.functional.rms_norm(want, want.shape[-1:])
            torch.cuda.synchronize()
        assert torch.equal(replayed, want)


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 8, 128), (2, 4, 8), (257, 8, 128), (3000, 2, 5)])
def test_slots_are_in_the_order_of_experts(tokens: int, choices: int, experts: int) -> None:
    made = torch.Generator("cuda").manual_seed(tokens)
    # Some have no expert, by more than one number.
    chosen = torch.randint(0, experts + 3, (tokens, choices), generator=made, device="cuda")
    order, starts, places = torch.ops.beheld.expert_places(chosen, experts)
    in_order, want = chosen.flatten().clamp(max=experts).sort(stable=True)
    assert torch.equal(order, want)
    assert torch.equal(starts.long(), torch.searchsorted(in_order, torch.arange(experts + 1, device="cuda")))
    assert torch.equal(places[order].long(), torch.arange(tokens * choices, device="cuda"))


@pytest.mark.parametrize("width", [24, 1000, 2048, 5120])
@pytest.mark.parametrize("placed", [False, True])
def test_slots_are_summed(width: int, placed: bool) -> None:
    chosen = torch.tensor([[0, 7, 2], [9, 1, 0], [7, 8, 7]], device="cuda")
    y, shares = numbers(9, width), torch.rand(3, 3, device="cuda")
    places = torch.randperm(9, device="cuda").int() if placed else None
    rows = y if places is None else y[places.long()]
    want = (rows.view(3, 3, width).double() * (shares * (chosen < 7)).unsqueeze(-1).double()).sum(1)
    without = (chosen >= 7).flatten()
    y[without if places is None else places[without].long()] = float("nan")
    assert close(torch.ops.beheld.expert_sum(y, places, chosen, shares, 7), want)


def test_many_rows_equal_the_definition() -> None:
    """Against the definition, token by token, and in a graph the same bits."""
    up, down = numbers(16, 512, 256, seed=1) * 0.05, numbers(16, 256, 256, seed=2) * 0.05
    x, shares = numbers(300, 256, seed=3), torch.rand(300, 4, device="cuda")
    chosen = torch.stack([torch.randperm(16, device="cuda")[:4] for _ in range(300)])

    def gated(inner: Tensor) -> Tensor:
        gate, other = inner.chunk(2, -1)
        return torch.nn.functional.silu(gate) * other

    def out() -> Tensor:
        return grouped(x, up.transpose(1, 2), down.transpose(1, 2), gated, chosen, shares)

    whole = out()
    want = torch.zeros(300, 256, dtype=torch.float64, device="cuda")
    for token in range(0, 300, 37):
        for choice, expert in enumerate(chosen[token].tolist()):
            inner = gated((up[expert].double() @ x[token].double()).unsqueeze(0))[0]
            want[token] += shares[token, choice].double() * (down[expert].double() @ inner)
        assert bool((whole[token].double() - want[token]).norm() <= 1e-2 * want[token].norm())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = out()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(again, whole)
