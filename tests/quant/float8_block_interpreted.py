"""The kernels of FP8 weights by blocks in Triton's interpreter; test_float8_block.py runs this in its own process."""

from __future__ import annotations

import pytest
import torch

from beheld.quant import float8_block_kernel
from beheld.quant.float8 import FP8
from beheld.quant.float8_block import BlockNumbers, rounded_groups
from beheld.quant.slots import UNSORTED, divided

# Slots without an expert are never written, and the kernel adds up whatever memory holds there.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in add:RuntimeWarning")


def slots_of(choices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels are given slots; on a CPU `divided` sorts a few too."""
    if choices.numel() <= UNSORTED:
        return choices.flatten(), torch.empty(0)
    return divided(choices, experts)


def blocks(outputs: int, inputs: int, height: int, group: int, seed: int = 0) -> BlockNumbers:
    made = torch.Generator().manual_seed(seed)
    rows = torch.randn(outputs, inputs, generator=made).to(FP8)
    return BlockNumbers(rows, torch.rand(outputs // height, inputs // group, generator=made))


def rounded_before(rows: int, inputs: int, group: int) -> torch.Tensor:
    """Activations that rounding leaves as they are, because the interpreter's own loses carries."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(7))
    x[:, ::group] = 448.0
    x[0, :group] = 0
    return x.to(FP8).float()


@pytest.mark.parametrize("group", [32, 64])
def test_groups_of_rows(group: int) -> None:
    x = torch.randn(5, 192 + 3, generator=torch.Generator().manual_seed(0))[:, :192]
    x[2, :group] = 0
    want, want_scale = rounded_groups(x, 192 // group)
    got, scale = torch.empty(7, 192), torch.empty(192 // group, 7)
    float8_block_kernel.rounded_groups(x, got, scale)
    assert torch.equal(scale[:, :5], want_scale)
    assert torch.equal(got[:5].to(FP8).float(), want.float())
    assert not got[5:].any()


# One part and several, of unequal length; tiles of rows and outputs that end early; a scale for each output.
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "height", "group", "multiprocessors"),
    [(1, 128, 256, 128, 128, 1), (3, 80, 160, 16, 32, 4), (20, 96, 192, 1, 64, 2), (40, 72, 192, 24, 64, 1)],
)
@pytest.mark.parametrize("biased", [True, False])
def test_products(
    rows: int, outputs: int, inputs: int, height: int, group: int, multiprocessors: int, biased: bool
) -> None:
    weight = blocks(outputs, inputs, height, group)
    x = rounded_before(rows, inputs, group)
    bias = torch.arange(outputs).half() if biased else None
    rounded, scale = rounded_groups(x, inputs // group)
    want = x @ weight.dequantized().t() + (0 if bias is None else bias.float())
    y = torch.full((rows, outputs), 7.0)
    float8_block_kernel.product(rounded, scale, weight.rows, weight.scale, height, bias, y, multiprocessors)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "multiprocessors"),
    [(1, 128, 256, 1), (3, 80, 160, 4), (20, 96, 192, 2), (40, 72, 192, 1), (150, 144, 64, 1)],
)
@pytest.mark.parametrize("biased", [True, False])
def test_products_with_a_scale_for_each_output(
    rows: int, outputs: int, inputs: int, multiprocessors: int, biased: bool
) -> None:
    made = torch.Generator().manual_seed(rows)
    weight, scale = torch.randn(outputs, inputs, generator=made).to(FP8), torch.rand(outputs, generator=made)
    x = torch.randn(rows, inputs, generator=made).to(FP8)
    x_scale = torch.rand(rows, generator=made)
    bias = torch.arange(outputs).half() if biased else None
    y = torch.full((rows, outputs), 7.0)
    float8_block_kernel.product_by_output(x, x_scale, weight, scale, bias, y, multiprocessors)
    want = (x.float() @ weight.float().t()) * x_scale[:, None] * scale + (0 if bias is None else bias.float())
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3)


def test_many_rows() -> None:
    weight, x = blocks(144, 64, 16, 32), rounded_before(150, 64, 32)
    rounded, scale = rounded_groups(x, 2)
    y = torch.full((150, 144), 7.0)
    float8_block_kernel.product(rounded, scale, weight.rows, weight.scale, 16, None, y, 1)
    torch.testing.assert_close(y, x @ weight.dequantized().t(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 2, 5), (20, 2, 3), (70, 3, 2)])
def test_experts(tokens: int, choices: int, experts: int) -> None:
    made = torch.Generator().manual_seed(tokens)
    rows, outputs, inputs = (1, choices)[tokens == 20] * tokens, 72, 128
    share = tokens * choices // rows
    chosen = torch.randint(0, experts + 1, (tokens, choices), generator=made)
    order, starts = slots_of(chosen, experts)
    x = rounded_before(rows, inputs, 64)
    rounded, scale = rounded_groups(x, 2)
    weight = blocks(experts * outputs, inputs, 24, 64)
    stacked = weight.rows.view(experts, outputs, inputs)
    whole = weight.dequantized().view(experts, outputs, inputs)
    y = torch.full((tokens * choices, outputs), 7.0)
    float8_block_kernel.grouped_product(rounded, scale, stacked, weight.scale, 24, order, starts, y, share)
    for slot, expert in enumerate(chosen.flatten().tolist()):
        if expert == experts:
            assert (y[slot] == 7).all(), "a slot of no expert is left alone"
            continue
        torch.testing.assert_close(y[slot], whole[expert] @ x[slot // share], rtol=1e-4, atol=1e-3)
