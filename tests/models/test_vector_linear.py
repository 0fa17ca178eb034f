"""Linear layers in bfloat16 on a CPU, multiplied by functions compiled for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from beheld.models.surgery.vector_linear import VectorLinear, can_multiply

pytestmark = pytest.mark.skipif(not can_multiply(), reason="needs a CPU that multiplies bfloat16, and llvmlite")


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(torch.bfloat16).requires_grad_(False)


# Outputs that fill no block, one block, and several tiles with a rest; rows of every tile and of two runs.
@pytest.mark.parametrize("outputs", [3, 16, 117])
@pytest.mark.parametrize("rows", [1, 2, 7, 15, 130])
def test_is_near_the_exact_product_and_each_row_alone(outputs: int, rows: int) -> None:
    linear = _linear(48, outputs)
    layer, x = VectorLinear(linear), torch.randn(rows, 48).bfloat16()
    exact = x.double() @ linear.weight.double().t() + linear.bias.double()
    found = layer(x)
    # Half a unit in the last place of bfloat16, and sums in float32.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()
    assert all(torch.equal(layer(x[row]), found[row]) for row in range(rows))


def test_gives_its_weights_back() -> None:
    linear = _linear(32, 21)
    made = VectorLinear(linear).restored()
    assert torch.equal(made.weight, linear.weight)
    assert torch.equal(made.bias, linear.bias)


def test_weights_may_begin_anywhere_in_a_larger_tensor() -> None:
    linear, whole = _linear(16, 16), torch.randn(1 + 16 * 16).bfloat16()
    linear.weight.data = whole[1:].view(16, 16)
    assert torch.equal(VectorLinear(linear).restored().weight, linear.weight)


def test_threads_share_outputs() -> None:
    layer, x = VectorLinear(_linear(512, 400, bias=False)), torch.randn(5, 512).bfloat16()
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(layer(x))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_other_types_are_refused() -> None:
    """Compiled functions read numbers by their address alone."""
    with pytest.raises(TypeError, match=r"float32.*bfloat16"):
        VectorLinear(_linear(16, 4))(torch.randn(2, 16))


def test_no_rows_give_none() -> None:
    assert VectorLinear(_linear(16, 4))(torch.empty(1, 0, 16, dtype=torch.bfloat16)).shape == (1, 0, 4)
