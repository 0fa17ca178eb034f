"""Products of a single row in Triton's interpreter, on a CPU; test_one_row.py runs this in a process of its own."""

from __future__ import annotations

import pytest
import torch

import beheld.models.one_row  # noqa: F401 (defines the operator)
from beheld.models.one_row_kernel import one_row


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(1, 1), (5, 7), (13, 64), (40, 1000), (24, 4096), (5, 4097), (6, 5120), (9, 11008), (1, 18944)],
)
def test_equals_float64(outputs: int, inputs: int, bias: bool) -> None:
    chance = torch.Generator().manual_seed(outputs)
    x_K = torch.randn(inputs, generator=chance)
    weight_NK = torch.randn(outputs, inputs, generator=chance)
    bias_N = torch.randn(outputs, generator=chance) if bias else None
    want = weight_NK.double() @ x_K.double() + (0.0 if bias_N is None else bias_N.double())
    got = one_row(x_K, weight_NK, bias_N, early=False)
    assert got.shape == (outputs,)
    torch.testing.assert_close(got.double(), want, atol=2e-6 * inputs**0.5, rtol=1e-5)


@pytest.mark.parametrize("inputs", [60, 4100])
def test_a_strided_row_and_a_strided_bias(inputs: int) -> None:
    """A row that was cut out of something may be a view whose elements do not lie side by side."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(1, inputs, 3, generator=chance)[..., 1]
    weight_NK = torch.randn(7, inputs, generator=chance)
    bias_N = torch.randn(7, 2, generator=chance)[:, 0]
    got = torch.ops.beheld.one_row_linear(x, weight_NK, bias_N)
    want = torch.nn.functional.linear(x.double(), weight_NK.double(), bias_N.double())
    assert got.shape == (1, 7)
    torch.testing.assert_close(got.double(), want, atol=2e-6 * inputs**0.5, rtol=1e-5)
    with pytest.raises(AssertionError):
        one_row(x[0], weight_NK, None, early=False)
