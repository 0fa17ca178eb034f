"""A Triton kernel of a single row: its RMS norm, and the product with a matrix stored output by output, in one launch.

Each program normalizes the row for itself, which costs it one more sum. It reads few weights, so that all programs of a
small product have theirs in registers before the previous kernel ends (models/one_row_kernel.py says how kernels start
early):

    signal  read weights  wait  normalize  multiply

Shapes: N outputs of a program, K inputs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.models.one_row_kernel import _options
from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait

# Inputs that a program can hold, and the numbers of a matrix that it reads.
MOST_INPUTS = 4096
_NUMBERS = 4096
# Numbers of a matrix that are worth it: half of what the registers of an H200 hold. With more, each program of
# one_row_kernel.py computes many outputs, and a norm before them costs less than one for each few outputs.
_MOST_NUMBERS = 1 << 23


def is_small(weight_NK: Tensor) -> bool:
    """Return whether `normed_row` is faster than a norm and a product."""
    outputs, inputs = weight_NK.shape
    return inputs <= MOST_INPUTS and outputs * triton.next_power_of_2(inputs) <= _MOST_NUMBERS


@triton.jit
def _normed(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    normed_ptr,
    num_inputs,
    num_outputs,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    FROM_ONE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes N outputs; the first one also writes the normalized row, if it is asked for."""
    if EARLY:
        gdc_launch_dependents()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    k_K = tl.arange(0, K)
    inside_K = k_K < num_inputs
    there_N = n_N < num_outputs
    line_N1 = n_N[:, None].to(tl.int64) * num_inputs
    w_NK = tl.load(weight_ptr + line_N1 + k_K[None, :], mask=there_N[:, None] & inside_K[None, :], other=0.0)
    g_K = tl.load(norm_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    x_K = tl.load(x_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
    x_K *= tl.rsqrt(tl.sum(x_K * x_K, 0) / num_inputs + eps)
    # Rounded as models/one_row_kernel.py's norm rounds.
    if not FROM_ONE:
        x_K = x_K.to(x_ptr.dtype.element_ty).to(tl.float32)
    x_K *= g_K + (1.0 if FROM_ONE else 0.0)
    short_K = x_K.to(x_ptr.dtype.element_ty)
    if normed_ptr is not None:
        tl.store(normed_ptr + k_K, short_K, mask=inside_K & (tl.program_id(0) == 0))
    y_N = tl.sum(w_NK.to(tl.float32) * short_K.to(tl.float32)[None, :], 1)
    if bias_ptr is not None:
        y_N += tl.load(bias_ptr + n_N, mask=there_N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n_N, y_N.to(y_ptr.dtype.element_ty), mask=there_N)


def normed_row(
    x_K: Tensor,
    norm_K: Tensor,
    eps: float,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    *,
    from_one: bool,
    early: bool,
    dtype: torch.dtype | None = None,
    normed_K: Tensor | None = None,
) -> Tensor:
    """Return weight @ norm(x) + bias, (N,), of at most `MOST_INPUTS` inputs, all contiguous; sums are in float32.

    Args:
        norm_K, eps: of the RMS norm.
        from_one: the norm's weights are offsets from one.
        early: start before the previous kernel ends; only if the hardware can.
        dtype: of the result; None: of x.
        normed_K: receives norm(x).
    """
    assert all(each is None or each.is_contiguous() for each in (x_K, norm_K, weight_NK, bias_N, normed_K))
    outputs, inputs = weight_NK.shape
    assert x_K.numel() == norm_K.numel() == inputs <= MOST_INPUTS
    y_N = x_K.new_empty(outputs, dtype=dtype)
    lanes = max(16, triton.next_power_of_2(inputs))
    # Of few outputs, each program has one, so that more programs read.
    at_once = min(4, max(1, _NUMBERS // lanes)) if outputs > 1024 else 1
    given = x_K, norm_K, weight_NK, bias_N, y_N, normed_K, inputs, outputs, eps
    _normed[(triton.cdiv(outputs, at_once),)](
        *given, at_once, lanes, from_one, early, num_warps=4, enable_fp_fusion=True, **_options(early)
    )
    return y_N
