"""The kernels of 4-bit weights in Triton's interpreter; test_int4_gpu.py runs this file in a process of its own."""

from __future__ import annotations

import pytest
import torch

from beheld.quant import int4_kernel
from beheld.quant.grouped import GroupedNumbers
from beheld.quant.int4_gpu import packed


def made(outputs: int, inputs: int, group: int) -> GroupedNumbers:
    generator = torch.Generator().manual_seed(outputs)
    whole = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scale = torch.rand(outputs, inputs // group, generator=generator).half().float()
    return GroupedNumbers(whole, scale, (-7 * scale).half().float(), 4)


# One part, several parts of unequal length, several tiles of rows and outputs.
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group", "multiprocessors"),
    [(1, 48, 256, 128, 1), (3, 48, 160, 32, 4), (17, 80, 192, 64, 8), (70, 144, 128, 64, 1)],
)
@pytest.mark.parametrize("biased", [True, False])
def test_products(rows: int, outputs: int, inputs: int, group: int, multiprocessors: int, biased: bool) -> None:
    numbers = made(outputs, inputs, group)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(outputs).half() if biased else None
    scale, low = numbers.scale_NG.t().contiguous().half(), numbers.low_NG.t().contiguous().half()
    y = torch.full((rows, outputs), 7.0)
    weight = packed(numbers.numbers_NK, inputs // group)
    int4_kernel.product(x, weight, scale, low, bias, y, multiprocessors)
    want = x.float() @ numbers.dequantized().t() + (0 if bias is None else bias.float())
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3)


def test_weights() -> None:
    numbers = made(40, 96, 32)
    out = torch.empty(40, 96)
    scale, low = numbers.scale_NG.t().contiguous().half(), numbers.low_NG.t().contiguous().half()
    int4_kernel.dequantized(packed(numbers.numbers_NK, 3), scale, low, out)
    torch.testing.assert_close(out, numbers.dequantized(), rtol=1e-5, atol=1e-5)
