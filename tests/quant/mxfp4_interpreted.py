"""The kernels of MXFP4 experts in Triton's interpreter; test_mxfp4_gpu.py runs this file in a process of its own."""

from __future__ import annotations

import pytest
import torch

from beheld.models.surgery import expert_row
from beheld.models.surgery.expert_row import use_expert_rows
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.rank_trial import RankTrial
from beheld.quant import mxfp4_kernel, mxfp4_row_kernel
from beheld.quant.float8 import FP8
from beheld.quant.mxfp4_experts import MXFP4Experts, dequantized, padded, parted, repacked, unpacked
from tests.quant.float8_block_interpreted import slots_of

# Slots without an expert are never written, and the kernel adds up whatever memory holds there.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in add:RuntimeWarning")


@pytest.mark.parametrize("inputs", [64, 192])
def test_rows_are_sums_of_two_terms(inputs: int) -> None:
    # The interpreter's own rounding to FP8 loses what is carried, so numbers are sums of two already.
    made = torch.Generator().manual_seed(0)
    high = torch.randint(8, 15, (7, inputs + 3), generator=made) * 16.0
    x = ((high + torch.randint(0, 8, high.shape, generator=made)) * 2.0 ** torch.arange(-3, 4)[:, None])[:, :inputs]
    x[4] = 0
    terms, scale = torch.empty(7, 2, padded(inputs)), torch.empty(7)
    mxfp4_kernel.parted_rows(x, terms, scale)
    assert torch.equal(terms.sum(1)[:, :inputs] * scale[:, None], x)
    assert not terms[..., inputs:].any()
    want, want_scale = parted(x.bfloat16())
    assert torch.equal(scale[:4], want_scale[:4])
    assert torch.equal(want.float().sum(1)[:, :inputs] * want_scale[:, None], x)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "multiprocessors"), [(1, 2, 5, 4), (24, 2, 3, 1), (70, 3, 2, 1)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_experts(tokens: int, choices: int, experts: int, multiprocessors: int, biased: bool) -> None:
    made = torch.Generator().manual_seed(tokens)
    rows, outputs, inputs = (1, choices)[tokens == 24] * tokens, 72, 192
    share = tokens * choices // rows
    chosen = torch.randint(0, experts + 1, (tokens, choices), generator=made)
    order, starts = slots_of(chosen, experts)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(120, 131, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=made)
    scales[0, 0, 0] = 0
    assert torch.equal(unpacked(*repacked(blocks, scales), inputs // 32)[0], blocks)
    bias = torch.randn(experts, outputs, generator=made) if biased else None
    x = torch.randn(rows, inputs, generator=made).to(FP8).bfloat16()
    terms, scale = parted(x)
    y = torch.full((tokens * choices, outputs), 7.0)
    weight, exponents = repacked(blocks, scales)
    mxfp4_kernel.grouped_product(terms, scale, weight, exponents, bias, order, starts, y, share, multiprocessors)
    meant = dequantized(blocks, scales).float()
    for slot, expert in enumerate(chosen.flatten().tolist()):
        if expert < experts:
            want = x[slot // share].float() @ meant[expert] + (0 if bias is None else bias[expert])
            torch.testing.assert_close(y[slot], want, rtol=1e-4, atol=1e-3)


def test_weights() -> None:
    made = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 72, 6, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(0, 251, (2, 72, 6), dtype=torch.uint8, generator=made)
    out = torch.empty(2, 72, 192)
    mxfp4_kernel.dequantized(*repacked(blocks, scales), out)
    assert torch.equal(out.transpose(1, 2), dequantized(blocks, scales).float())


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(12, 192), (16, 32), (8, 1184)])
def test_a_single_row(outputs: int, inputs: int, biased: bool) -> None:
    """The last choice names no expert."""
    made = torch.Generator().manual_seed(inputs)
    blocks = torch.randint(0, 256, (5, outputs, inputs // 32, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(120, 131, (5, outputs, inputs // 32), dtype=torch.uint8, generator=made)
    scales[0, 0, 0] = 0
    meant, stored = dequantized(blocks, scales).double(), repacked(blocks, scales)
    bias = torch.randn(5, outputs, generator=made) if biased else None
    choices, shares = [4, 0, 5], torch.rand(3, generator=made)
    x = torch.randn(3, inputs, generator=made).bfloat16()
    wanted = [x[place].double() @ meant[expert] for place, expert in enumerate(choices[:2])]
    wanted = [each + (0 if bias is None else bias[expert]) for each, expert in zip(wanted, choices, strict=False)]
    # Results are in bfloat16, to which the interpreter cuts numbers.
    close = {"atol": 1e-5 * float(max(each.abs().max() for each in wanted)), "rtol": 2**-7}
    for place in range(2):
        got = mxfp4_row_kernel.row(x[place : place + 1], *stored, bias, torch.tensor(choices), None, early=False)
        torch.testing.assert_close(got[place].double(), wanted[place], **close)
    got = mxfp4_row_kernel.row(x, *stored, bias, torch.tensor(choices), shares, early=False)
    torch.testing.assert_close(got.double(), shares[0] * wanted[0] + shares[1] * wanted[1], **close)


@torch.inference_mode()
def test_experts_of_a_single_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the module computes them for many; rows of 16 bits that the kernel's terms hold."""
    # The interpreter cuts numbers to bfloat16 where a GPU rounds them.
    monkeypatch.setattr(expert_row, "_CLOSE", 2e-2)

    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = torch.Generator().manual_seed(1)
            self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(4, 64, generator=made).bfloat16())
            self.down_proj_bias = torch.nn.Parameter(torch.randn(4, 96, generator=made).bfloat16())

        def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
            return (x[..., 1::2] + 1) * torch.nn.functional.silu(x[..., ::2])

    made = torch.Generator().manual_seed(2)
    stored = []
    for outputs, inputs in ((64, 96), (96, 32)):
        blocks = torch.randint(0, 256, (4, outputs, inputs // 32, 16), dtype=torch.uint8, generator=made)
        scales = torch.randint(118, 128, (4, outputs, inputs // 32), dtype=torch.uint8, generator=made)
        stored.append(repacked(blocks, scales))
    experts = MXFP4Experts(Gate(), stored[0], stored[1], (3, 1))
    given = torch.randn(1, 96, generator=made).bfloat16(), torch.tensor([[2, 0]]), torch.rand(1, 2, generator=made)
    want = experts(*given)
    changes = Changes()
    assert use_expert_rows(torch.nn.ModuleList([experts]), changes, RankTrial(None)) == 1
    assert experts.one_row
    torch.testing.assert_close(experts(*given), want, atol=2e-2 * float(want.abs().max()), rtol=2e-2)
    changes.take_back()
    assert not experts.one_row
