"""The kernels of 4-bit weights in Triton's interpreter; test_int4_gpu.py runs this file in a process of its own."""

from __future__ import annotations

import pytest
import torch

from beheld.quant import int4_kernel
from beheld.quant.grouped import GroupedNumbers
from beheld.quant.int4_gpu import packed
from beheld.quant.int4_kernel import Tiling
from beheld.quant.lanes_kernel import RowTiling


def made(outputs: int, inputs: int, group: int, low: float) -> GroupedNumbers:
    generator = torch.Generator().manual_seed(outputs)
    whole = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scale = torch.rand(outputs, inputs // group, generator=generator).half().float()
    return GroupedNumbers(whole, scale, (low * scale).half().float(), 4)


# One part, several parts of unequal length, several tiles of rows and outputs, inputs that do not fill their blocks.
ROWS = Tiling(rows=8, outputs=32, warps=1, stages=1, programs=1)
CASES = [
    (1, 48, 256, 128, torch.float16, RowTiling(2, 1)),
    (1, 48, 448, 64, torch.bfloat16, RowTiling(1, 1)),
    (1, 32, 160, 32, torch.float16, RowTiling(4, 1)),
    (1, 32, 160, 32, torch.float32, ROWS),
    (3, 48, 160, 32, torch.float16, ROWS),
    (9, 80, 192, 64, torch.float32, ROWS),
    (5, 32, 768, 128, torch.float32, ROWS),
]


@pytest.mark.parametrize(("rows", "outputs", "inputs", "group", "dtype", "tiling"), CASES)
@pytest.mark.parametrize("low", [-8.0, -6.6])
def test_products(
    rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype, tiling: Tiling | RowTiling, low: float
) -> None:
    numbers = made(outputs, inputs, group, low)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.arange(outputs).half() if low < -7 else None
    residual = torch.randn(rows, outputs).half() if isinstance(tiling, RowTiling) else None
    scale, lows = (each.t().contiguous().half() for each in (numbers.scale_NG, numbers.low_NG))
    y = torch.full((rows, outputs), 7.0)
    int4_kernel.product(
        x,
        packed(numbers.numbers_NK),
        scale,
        None if low == -8 else lows,
        bias,
        y,
        4,
        residual_TN=residual,
        tiling=tiling,
    )
    want = x.float() @ numbers.dequantized().t()
    for each in (bias, residual):
        want = want if each is None else want + each.float()
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("low", [-8.0, -6.6])
def test_weights(low: float) -> None:
    numbers = made(48, 160, 32, low)
    out = torch.empty(48, 160)
    scale, lows = (each.t().contiguous().half() for each in (numbers.scale_NG, numbers.low_NG))
    int4_kernel.dequantized(packed(numbers.numbers_NK), scale, None if low == -8 else lows, out)
    torch.testing.assert_close(out, numbers.dequantized(), rtol=1e-5, atol=1e-5)
