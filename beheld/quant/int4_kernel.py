"""Triton kernels of 4-bit weights in groups: dequantized in registers, multiplied in 16 bits, summed in float32.

A weight is low + scale q. Within a group's bytes, the lower halves are the first half of its inputs and the upper
halves the second, so that a tile of bytes gives two tiles of numbers without moving any:

    group of 128 inputs, byte j:   q(j) + 16 q(j + 64)

A group's part of a product is scale sum((q - 8) x) + (low + 8 scale) sum(x). With few rows there are too few tiles of
outputs to read memory at full speed, so the inputs are split among programs, whose sums another kernel adds in order.

Shapes: T rows, N outputs, K inputs, G groups, J bytes of a group, P parts of the inputs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# bfloat16 128 + q has q in its last bits; less 136 it is q - 8. Both are exact.
_ONE_TWO_EIGHT: tl.constexpr = tl.constexpr(0x4300)
# Programs that keep a GPU's memory busy.
_PROGRAMS_PER_SM = 2
_MOST_PARTS = 8


@triton.jit
def _centered(halves, kind: tl.constexpr, BRAIN: tl.constexpr):
    """Return q - 8 of q, whole numbers from 0 to 15, in a type; BRAIN: it is bfloat16."""
    if BRAIN:
        return ((halves | _ONE_TWO_EIGHT).to(tl.bfloat16, bitcast=True) - 136.0).to(kind)
    return (halves.to(tl.float32) - 8.0).to(kind)


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    scale_ptr,
    low_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    num_groups,
    groups_per_part,
    J: tl.constexpr,
    T: tl.constexpr,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    BRAIN: tl.constexpr,
):
    """One program computes T rows of N outputs over one part of the groups, into its part of y (P, T, N)."""
    part = tl.program_id(2)
    t_T = tl.program_id(1) * T + tl.arange(0, T)
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    there_T, inside_N = t_T < num_rows, n_N < num_outputs
    j_J = tl.arange(0, J)
    x_TJ_ptr = x_ptr + t_T.to(tl.int64)[:, None] * num_inputs + j_J[None, :]
    w_JN_ptr = weight_ptr + n_N.to(tl.int64)[None, :] * (num_groups * J) + j_J[:, None]
    acc_TN = tl.zeros([T, N], tl.float32)
    first = part * groups_per_part
    for g in range(first, tl.minimum(first + groups_per_part, num_groups)):
        w_JN = tl.load(w_JN_ptr + g * J, mask=inside_N[None, :], other=0).to(tl.int16)
        early_TJ = tl.load(x_TJ_ptr + g * 2 * J, mask=there_T[:, None], other=0.0)
        late_TJ = tl.load(x_TJ_ptr + g * 2 * J + J, mask=there_T[:, None], other=0.0)
        scale_N = tl.load(scale_ptr + g * num_outputs + n_N, mask=inside_N, other=0.0).to(tl.float32)
        low_N = tl.load(low_ptr + g * num_outputs + n_N, mask=inside_N, other=0.0).to(tl.float32)
        sum_TN = tl.dot(early_TJ, _centered(w_JN & 15, early_TJ.dtype, BRAIN), input_precision="ieee")
        sum_TN = tl.dot(late_TJ, _centered((w_JN >> 4) & 15, late_TJ.dtype, BRAIN), sum_TN, input_precision="ieee")
        total_T = tl.sum(early_TJ.to(tl.float32), 1) + tl.sum(late_TJ.to(tl.float32), 1)
        acc_TN += sum_TN * scale_N[None, :] + total_T[:, None] * (low_N + 8.0 * scale_N)[None, :]
    if BIAS:
        acc_TN += tl.load(bias_ptr + n_N, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    y_TN_ptr = y_ptr + (part.to(tl.int64) * num_rows + t_T)[:, None] * num_outputs + n_N[None, :]
    tl.store(y_TN_ptr, acc_TN.to(y_ptr.dtype.element_ty), mask=there_T[:, None] & inside_N[None, :])


@triton.jit
def _added(parts_ptr, bias_ptr, y_ptr, num_numbers, num_outputs, P: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr):
    """One program adds S numbers of all parts."""
    s_S = tl.program_id(0) * S + tl.arange(0, S)
    inside_S = s_S < num_numbers
    sum_S = tl.zeros([S], tl.float32)
    for part in tl.static_range(P):
        sum_S += tl.load(parts_ptr + part * num_numbers + s_S, mask=inside_S, other=0.0)
    if BIAS:
        sum_S += tl.load(bias_ptr + s_S % num_outputs, mask=inside_S, other=0.0).to(tl.float32)
    tl.store(y_ptr + s_S, sum_S.to(y_ptr.dtype.element_ty), mask=inside_S)


@triton.jit
def _dequantized(weight_ptr, scale_ptr, low_ptr, out_ptr, num_outputs, num_groups, J: tl.constexpr, N: tl.constexpr):
    """One program writes the weights of N outputs in one group."""
    g = tl.program_id(1)
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    inside_N1 = (n_N < num_outputs)[:, None]
    j_J = tl.arange(0, J)
    row_N = n_N.to(tl.int64) * num_groups + g
    w_NJ = tl.load(weight_ptr + row_N[:, None] * J + j_J[None, :], mask=inside_N1, other=0)
    scale_N1 = tl.load(scale_ptr + g * num_outputs + n_N, mask=n_N < num_outputs, other=0.0).to(tl.float32)[:, None]
    low_N1 = tl.load(low_ptr + g * num_outputs + n_N, mask=n_N < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_NJ_ptr = out_ptr + row_N[:, None] * (2 * J) + j_J[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(out_NJ_ptr, ((w_NJ & 15).to(tl.float32) * scale_N1 + low_N1).to(kind), mask=inside_N1)
    tl.store(out_NJ_ptr + J, ((w_NJ >> 4).to(tl.float32) * scale_N1 + low_N1).to(kind), mask=inside_N1)


def product(
    x_TK: Tensor,
    weight_NX: Tensor,
    scale_GN: Tensor,
    low_GN: Tensor,
    bias_N: Tensor | None,
    y_TN: Tensor,
    multiprocessors: int,
) -> None:
    """Fill `y_TN` with x W^T + bias.

    Args:
        x_TK: contiguous.
        weight_NX: bytes, (N, K / 2), see the figure above.
        multiprocessors: of the GPU.
    """
    (rows, inputs), outputs, groups = x_TK.shape, weight_NX.shape[0], scale_GN.shape[0]
    if not rows:
        return
    t, n, warps, stages = _tiles(rows)
    columns, tiles = triton.cdiv(outputs, n), triton.cdiv(rows, t)
    parts = 1
    if rows <= 64:
        parts = max(1, min(_MOST_PARTS, _PROGRAMS_PER_SM * multiprocessors // (columns * tiles), groups))
    per_part = triton.cdiv(groups, parts)
    parts = triton.cdiv(groups, per_part)
    out = y_TN if parts == 1 else x_TK.new_empty((parts, rows, outputs), dtype=torch.float32)
    _product[(columns, tiles, parts)](
        x_TK,
        weight_NX,
        scale_GN,
        low_GN,
        bias_N,
        out,
        rows,
        outputs,
        inputs,
        groups,
        per_part,
        weight_NX.shape[1] // groups,
        t,
        n,
        bias_N is not None and parts == 1,
        x_TK.dtype == torch.bfloat16,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=True,
    )
    if parts > 1:
        size = 512
        _added[(triton.cdiv(rows * outputs, size),)](
            out,
            bias_N,
            y_TN,
            rows * outputs,
            outputs,
            parts,
            size,
            bias_N is not None,
            num_warps=4,
            enable_fp_fusion=True,
        )


def dequantized(weight_NX: Tensor, scale_GN: Tensor, low_GN: Tensor, out_NK: Tensor) -> None:
    """Fill `out_NK` with the weights, rounded to its type."""
    groups, outputs = scale_GN.shape
    grid = triton.cdiv(outputs, 32), groups
    _dequantized[grid](
        weight_NX,
        scale_GN,
        low_GN,
        out_NK,
        outputs,
        groups,
        weight_NX.shape[1] // groups,
        32,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _tiles(rows: int) -> tuple[int, int, int, int]:
    """Return a tile's rows and outputs, warps and stages."""
    if rows <= 16:
        return 16, 32, 4, 4
    if rows <= 32:
        return 32, 64, 4, 4
    return (64, 64, 4, 3) if rows <= 64 else (64, 128, 4, 3)
