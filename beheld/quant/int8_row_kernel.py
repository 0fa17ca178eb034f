"""A Triton kernel of a single row times int8 weights with a scale for each output.

The row is rounded first, by one program that starts early; see int8_kernel.py, also for why the result has the bits
that this row has among others. Four inputs are multiplied and added by one instruction (`dp4a`), on words of 32 bits,
which takes far less time than reading them.

Early starts are those of models/one_row_kernel.py.

Shapes: N outputs, K inputs, W words at a time.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.quant.int8_kernel import scaled
from beheld.quant.lanes_kernel import store_outputs

# Triton's interpreter has no assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret
# Outputs and inputs are multiples of this.
ALIGNED = 16
# From so many outputs on there are programs enough.
_MANY_OUTPUTS = 16384


@dataclass(frozen=True)
class RowTiles:
    """What a program computes.

    Attributes:
        outputs: of it, a power of two up to ALIGNED.
        words: that are multiplied at a time, of each output.
        warps: of it.
    """

    outputs: int
    words: int
    warps: int


@triton.jit
def _products(weight, x, sum, ASSEMBLY: tl.constexpr):
    """Return sums plus the products of the four numbers of words."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weight, x, sum], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for i in tl.static_range(4):
            sum += ((weight << (24 - 8 * i)) >> 24) * ((x << (24 - 8 * i)) >> 24)
        return sum


@triton.jit
def _row(
    x_ptr,
    step_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_fours,
    N: tl.constexpr,
    W: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes N outputs; the next words load while the current ones are multiplied.

    The row and the weights are read as words of 32 bits, four times `num_fours` of an output.
    """
    if EARLY:
        gdc_launch_dependents()
    # So the compiler knows that words can be read by fours.
    num_words = num_fours * 4
    w_W = tl.arange(0, W)
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    line_NW_ptr = weight_ptr + n_N.to(tl.int64)[:, None] * num_words + w_W[None, :]
    next_NW = tl.load(line_NW_ptr, mask=(w_W < num_words)[None, :], other=0)
    if EARLY:
        gdc_wait()
    sum_NW = tl.zeros([N, W], tl.int32)
    for at in range(0, num_words, W):
        weight_NW = next_NW
        x_W = tl.load(x_ptr + at + w_W, mask=at + w_W < num_words, other=0)
        next_NW = tl.load(line_NW_ptr + at + W, mask=(at + W + w_W < num_words)[None, :], other=0)
        sum_NW = _products(weight_NW, tl.broadcast_to(x_W[None, :], [N, W]), sum_NW, ASSEMBLY)
    y_N = scaled(tl.sum(sum_NW, 1), tl.load(step_ptr), tl.load(scale_ptr + n_N))
    store_outputs(y_N, n_N, bias_ptr, residual_ptr, y_ptr)


def row(
    x_K: Tensor,
    step_1: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    residual_N: Tensor | None,
    y_N: Tensor,
    *,
    early: bool,
    tiles: RowTiles | None = None,
) -> None:
    """Fill `y_N` with x W^T + bias (+ residual); all contiguous, N and K multiples of 16.

    Args:
        x_K, step_1: int8, and float32; see int8_gpu.rounded_rows.
        early: start before the previous kernel ends; only if the hardware can.
        tiles: None to choose.
    """
    outputs, inputs = weight_NK.shape
    assert outputs % ALIGNED == 0 == inputs % ALIGNED
    made = row_tiles(outputs) if tiles is None else tiles
    _row[(outputs // made.outputs,)](
        x_K.view(torch.int32), step_1, weight_NK.view(torch.int32), scale_N, bias_N, residual_N, y_N, inputs // 16,
        made.outputs, made.words, _ASSEMBLY, early,
        num_warps=made.warps, enable_fp_fusion=False, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def row_tiles(outputs: int) -> RowTiles:
    """Return how so many outputs are computed."""
    return RowTiles(16, 128, 4) if outputs >= _MANY_OUTPUTS else RowTiles(8, 256, 4)
