"""The Triton kernel of `one_row`: a vector times a matrix that lies output by output.

Shapes: N outputs of a program, K inputs read at a time.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# A program reads its outputs' weights at once where the inputs are few; otherwise so many of them at a time.
_MOST_AT_ONCE = 4096


@triton.jit
def _one_row(
    x_ptr, weight_ptr, bias_ptr, y_ptr, num_inputs, num_outputs, N: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr
):
    """One program: N outputs. EARLY: this kernel may have been started before the one before it has ended."""
    if EARLY:
        gdc_launch_dependents()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    k_K = tl.arange(0, K)
    there_N = n_N < num_outputs
    line_ptr = weight_ptr + n_N[:, None].to(tl.int64) * num_inputs
    w_NK = tl.load(line_ptr + k_K[None, :], mask=there_N[:, None] & (k_K < num_inputs)[None, :], other=0.0)
    if EARLY:
        # Weights were there all along; what comes from other kernels is there from here on.
        gdc_wait()
    x_K = tl.load(x_ptr + k_K, mask=k_K < num_inputs, other=0.0)
    sum_NK = w_NK.to(tl.float32) * x_K.to(tl.float32)[None, :]
    for first in range(K, num_inputs, K):
        inside_K = first + k_K < num_inputs
        w_NK = tl.load(line_ptr + first + k_K[None, :], mask=there_N[:, None] & inside_K[None, :], other=0.0)
        x_K = tl.load(x_ptr + first + k_K, mask=inside_K, other=0.0)
        sum_NK += w_NK.to(tl.float32) * x_K.to(tl.float32)[None, :]
    y_N = tl.sum(sum_NK, 1)
    if bias_ptr is not None:
        y_N += tl.load(bias_ptr + n_N, mask=there_N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n_N, y_N.to(y_ptr.dtype.element_ty), mask=there_N)


def one_row(x_K: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, early: bool) -> Tensor:
    """weight @ x + bias, (N,); sums are taken in float32.

    Args:
        early: start before the kernel before this one has ended; only where the hardware can.
    """
    num_outputs, num_inputs = weight_NK.shape
    y_N = x_K.new_empty(num_outputs)
    at_once = min(_MOST_AT_ONCE, triton.next_power_of_2(num_inputs))
    # Measured on an H200 in chains of a decoder's layers, 3B and 7B: more under way is better than more programs.
    outputs, warps = (2, 4) if num_inputs <= _MOST_AT_ONCE else (4, 8)
    options = {"launch_pdl": True} if early else {}
    _one_row[(triton.cdiv(num_outputs, outputs),)](
        x_K,
        weight_NK,
        bias_N,
        y_N,
        num_inputs,
        num_outputs,
        outputs,
        at_once,
        early,
        num_warps=warps,
        enable_fp_fusion=True,
        **options,
    )
    return y_N
