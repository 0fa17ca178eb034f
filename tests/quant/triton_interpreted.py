"""The kernels of FP8 layers in Triton's interpreter; test_float8.py runs this file in a process of its own."""

from __future__ import annotations

import pytest
import torch

from beheld.quant import float8_kernel
from beheld.quant.float8 import FP8, _division, rounded_rows


# Rows of more than 8,192 inputs are read twice.
@pytest.mark.parametrize(("rows", "inputs"), [(9, 48), (9, 130), (3, 9000), (3, 8193), (1, 9000)])
def test_rows(rows: int, inputs: int) -> None:
    x = torch.randn(rows, inputs + 3, generator=torch.Generator().manual_seed(0))[:, :inputs]
    x[rows // 2] *= 0 if rows > 1 else 1e-38
    want, want_scale = rounded_rows(x)
    # Rounded behind the kernel: the interpreter's own rounding to FP8 loses what is carried into the exponent.
    got, scale = torch.empty(rows, inputs), torch.empty(rows)
    float8_kernel.rounded_rows(x, got, scale)
    assert torch.equal(scale, want_scale)
    assert torch.equal(got.to(FP8).float(), want.float())


@pytest.mark.parametrize(("tokens", "choices", "groups"), [(1, 2, 5), (40, 2, 3), (90, 3, 2), (150, 1, 1)])
def test_groups(tokens: int, choices: int, groups: int) -> None:
    made = torch.Generator().manual_seed(tokens)
    rows, outputs, inputs = (1, choices)[tokens == 40] * tokens, 72, 144
    share = tokens * choices // rows
    chosen = torch.randint(0, groups + 1, (tokens, choices), generator=made)
    order, starts = _division(chosen, groups)
    x, x_scale = rounded_rows(torch.randn(rows, inputs, generator=made))
    weight, scale = rounded_rows(torch.randn(groups * outputs, inputs, generator=made))
    weight, scale = weight.view(groups, outputs, inputs), scale.view(groups, outputs)
    y = torch.full((tokens * choices, outputs), 7.0)
    float8_kernel.grouped_product(x, x_scale, weight, scale, order, starts, y, share)
    for slot, group in enumerate(chosen.flatten().tolist()):
        row = slot // share
        if group == groups:
            assert (y[slot] == 7).all(), "a slot of no group is left alone"
            continue
        want = (weight[group].float() @ x[row].float()) * x_scale[row] * scale[group]
        torch.testing.assert_close(y[slot], want, rtol=1e-4, atol=1e-4)
