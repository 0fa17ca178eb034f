"""Linear layers of one row on a GPU: right for every size, and in chains of kernels that start early."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.models.one_row import linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 7), (2560, 2048), (2048, 11008), (3000, 1000), (151936, 256)])
def test_equals_float64(outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) if bias else None
    want = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    got = linear(x, weight, b)
    assert got.shape == (1, 1, outputs)
    assert (got.double() - want).norm() <= 3e-3 * want.norm()


def test_a_long_chain_in_a_graph() -> None:
    """Each layer reads what the one before wrote: a kernel that read too early would show."""
    torch.manual_seed(0)
    weights = [torch.randn(1536, 1536, device="cuda", dtype=torch.bfloat16) / 1536**0.5 for _ in range(64)]
    x = torch.randn(1, 1536, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for index, weight in enumerate(weights):
            y = linear(y, weight, None)
            if index % 3 == 0:
                y = y * 1.5
        return y

    want = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)
