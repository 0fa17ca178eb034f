"""Linear layers of one row on a GPU: right for every size, and in chains of kernels that start early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.models.early import compile_options, early_start

from beheld.models.one_row import OneRowLinear, linear


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


def test_a_weight_that_is_a_strided_view() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 300, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(300, 200, device="cuda", dtype=torch.bfloat16).t()
    want = torch.nn.functional.linear(x.double(), weight.double())
    assert (linear(x, weight, None).double() - want).norm() <= 3e-3 * want.norm()


def check_in_a_graph(chain: Callable[[], torch.Tensor], want: torch.Tensor) -> None:
    """Replayed again and again, where kernels follow each other as fast as they can, it gives the same."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


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
    check_in_a_graph(chain, want)


class Block(torch.nn.Module):
    """Products and what is between them in a layer, on random weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(size)
        self.up = OneRowLinear(torch.nn.Linear(size, 3 * size))
        self.down = OneRowLinear(torch.nn.Linear(3 * size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def test_compiled_kernels_signal_first_and_wait() -> None:
    """In a chain whose kernels all begin as early as they can, each finds what all before it have written."""
    if not early_start(torch.device("cuda")):
        pytest.skip("needs a GPU whose kernels can start early")
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    blocks = [Block(1024).to("cuda", torch.bfloat16) for _ in range(24)]
    x = torch.randn(1, 1, 1024, device="cuda", dtype=torch.bfloat16)
    options = {"emulate_precision_casts": True, **compile_options(blocks[0])}
    compiled = torch.compile(Block.forward, dynamic=True, fullgraph=True, options=options)
    with torch.inference_mode():
        _, (code, *_) = run_and_get_code(compiled, blocks[0], x)
        kernels = code.split("def triton_")[1:]
        assert kernels
        for kernel in kernels:
            signal, wait = kernel.index("gdc_launch_dependents()"), kernel.index("gdc_wait()")
            assert signal < wait < min(kernel.index(access) for access in ("tl.load(", "tl.store(")), kernel

        def chain() -> torch.Tensor:
            y = x
            for block in blocks:
                y = compiled(block, y)
            return y

        want = x
        for block in blocks:
            want = compiled(block, want)
            torch.cuda.synchronize()
        check_in_a_graph(chain, want)
