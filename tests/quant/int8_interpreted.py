"""The kernels of int8 weights in Triton's interpreter; test_int8_gpu.py runs this file in a process of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from beheld.quant import int8_kernel, int8_row_kernel
from beheld.quant.int8_gpu import rounded_rows
from beheld.quant.int8_kernel import FewTiles, ManyTiles
from beheld.quant.int8_row_kernel import RowTiles


def whole(*sizes: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, sizes, dtype=torch.int8, generator=made)


def meant(x: Tensor, step: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """To the last bit, whatever the kernel."""
    y = (x.double() @ weight.double().t()).float() * step[:, None] * scale
    return y if bias is None else y + bias.float()


# Rows of more than 8,192 inputs are read twice.
@pytest.mark.parametrize(("rows", "inputs"), [(9, 48), (9, 130), (3, 9000), (1, 9000)])
def test_rows(rows: int, inputs: int) -> None:
    x = torch.randn(rows, inputs + 3, generator=torch.Generator().manual_seed(0))[:, :inputs]
    x[rows // 2] *= 0 if rows > 1 else 1e-38
    # Halves of a step are rounded to even.
    x[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    want, want_step = rounded_rows(x)
    got, step = torch.empty(rows, inputs, dtype=torch.int8), torch.empty(rows)
    int8_kernel.rounded_rows(x, got, step)
    assert torch.equal(step, want_step)
    assert torch.equal(got, want)
    assert got[0].abs().amax() == 127


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(value: float) -> None:
    x = torch.randn(3, 48)
    x[1, 5] = value
    got, step = torch.empty(3, 48, dtype=torch.int8), torch.empty(3)
    int8_kernel.rounded_rows(x, got, step)
    assert step.isfinite().tolist() == [True, False, True]
    assert bool(step[1].isnan()) == (value != value)


FEW = FewTiles(outputs=64, rows=16, inputs=64, warps=4, stages=3)


# One part and several, of unequal length; tiles of rows, outputs and inputs that end early.
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tiles"),
    [
        (1, 128, 256, None),
        (3, 80, 160, FewTiles(64, 16, 64, 4, 3, 3)),
        (20, 96, 208, FewTiles(64, 32, 64, 4, 3, 2)),
        (40, 72, 192, FEW),
        (150, 144, 64, None),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_few_rows(rows: int, outputs: int, inputs: int, tiles: FewTiles | None, biased: bool) -> None:
    x, weight = whole(rows, inputs, seed=rows), whole(outputs, inputs)
    step, scale = torch.rand(rows), torch.rand(outputs)
    bias = torch.arange(outputs).half() if biased else None
    y = torch.full((rows, outputs), 7.0)
    int8_kernel.few_rows(x, step, weight, scale, bias, y, 4, tiles)
    assert torch.equal(y, meant(x, step, weight, scale, bias))


# A program for each tile, and fewer; tiles that end early.
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tiles"),
    [
        (70, 96, 128, ManyTiles(32, 64, 64, 4, 2)),
        (70, 48, 144, ManyTiles(32, 32, 64, 4, 2, programs=1)),
        (70, 96, 128, ManyTiles(32, 64, 64, 4, 2, copied=True)),
        (70, 48, 144, ManyTiles(32, 32, 64, 4, 2, copied=True, programs=1)),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_many_rows(rows: int, outputs: int, inputs: int, tiles: ManyTiles, biased: bool) -> None:
    x, weight = whole(rows, inputs, seed=rows), whole(outputs, inputs)
    step, scale = torch.rand(rows), torch.rand(outputs)
    bias = torch.arange(outputs).half() if biased else None
    y = torch.full((rows, outputs), 7.0)
    int8_kernel.many_rows(x, step, weight, scale, bias, y, 2, tiles)
    assert torch.equal(y, meant(x, step, weight, scale, bias))


@pytest.mark.parametrize("biased", [True, False])
def test_parts_are_added_as_whole_numbers(biased: bool) -> None:
    """Sums that float32 does not hold."""
    parts = torch.randint(-(1 << 28), 1 << 28, (3, 5, 1040), dtype=torch.int32)
    step, scale = torch.rand(5), torch.rand(1040)
    bias = torch.arange(1040).half() if biased else None
    y = torch.full((5, 1040), 7.0)
    int8_kernel.add_parts(parts, step, scale, bias, y)
    want = parts.sum(0).float() * step[:, None] * scale
    assert torch.equal(y, want if bias is None else want + bias.float())


@pytest.mark.parametrize(
    ("outputs", "inputs", "tiles"),
    [(16, 64, None), (48, 1008, RowTiles(16, 64, 2)), (32, 5040, RowTiles(8, 256, 4)), (16, 16, RowTiles(4, 128, 1))],
)
def test_one_row(outputs: int, inputs: int, tiles: RowTiles | None) -> None:
    x, weight = whole(1, inputs, seed=1), whole(outputs, inputs)
    step, scale = torch.rand(1), torch.rand(outputs)
    bias, residual = torch.arange(outputs).half(), torch.randn(outputs)
    want = meant(x, step, weight, scale, bias)[0]
    y = torch.full((outputs,), 7.0)
    int8_row_kernel.row(x[0], step, weight, scale, bias, None, y, early=False, tiles=tiles)
    assert torch.equal(y, want)
    int8_row_kernel.row(x[0], step, weight, scale, bias, residual, y, early=False, tiles=tiles)
    assert torch.equal(y, want + residual)
    int8_row_kernel.row(x[0], step, weight, scale, None, None, y, early=False, tiles=tiles)
    assert torch.equal(y, meant(x, step, weight, scale, None)[0])
