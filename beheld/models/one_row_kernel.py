"""The Triton kernels of `one_row`: a vector times a matrix that lies output by output.

Shapes: N outputs of a program, K inputs, J inputs read at a time.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from beheld.platform.registry import platform_of

# How many weights of an output a program reads at once: all, where there are no more.
_MOST_AT_ONCE = 4096
# All that follows was measured on an H200 in the layers of a decoder, 3B and 7B. Of short rows a multiprocessor runs so
# many programs, each with two warps; of long ones each program has eight.
_PROGRAMS_PER_SM = 12
_LONG_OUTPUTS = 4
_LONG_AT_A_TIME = 1024
_STAGES = 4


@triton.jit
def _short_rows(x_ptr, weight_ptr, bias_ptr, y_ptr, num_inputs, num_outputs, K: tl.constexpr, EARLY: tl.constexpr):
    """One program: an output, then others; the next one's weights are on their way while this one's are added up.

    EARLY: this kernel may have been started before the one before it has ended; weights are there all along.
    """
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    k_K = tl.arange(0, K)
    inside_K = k_K < num_inputs
    w_K = tl.load(weight_ptr + first.to(tl.int64) * num_inputs + k_K, mask=inside_K, other=0.0)
    if EARLY:
        gdc_wait()
    x_K = tl.load(x_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
    for n in range(first, num_outputs, programs):
        following = n + programs
        next_ptr = weight_ptr + following.to(tl.int64) * num_inputs
        next_K = tl.load(next_ptr + k_K, mask=k_K < tl.where(following < num_outputs, num_inputs, 0), other=0.0)
        y = tl.sum(w_K.to(tl.float32) * x_K, 0)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n).to(tl.float32)
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))
        w_K = next_K


@triton.jit
def _long_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_inputs,
    num_outputs,
    N: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: N outputs; the first K weights of each at once, the others through shared memory."""
    if EARLY:
        gdc_launch_dependents()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    k_K = tl.arange(0, K)
    there_N = n_N < num_outputs
    line_ptr = weight_ptr + n_N[:, None].to(tl.int64) * num_inputs
    w_NK = tl.load(line_ptr + k_K[None, :], mask=there_N[:, None] & (k_K < num_inputs)[None, :], other=0.0)
    if EARLY:
        gdc_wait()
    x_K = tl.load(x_ptr + k_K, mask=k_K < num_inputs, other=0.0)
    y_N = tl.sum(w_NK.to(tl.float32) * x_K.to(tl.float32)[None, :], 1)
    j_J = tl.arange(0, J)
    sum_NJ = tl.zeros([N, J], tl.float32)
    for at in tl.range(K, num_inputs, J, num_stages=STAGES):
        inside_J = at + j_J < num_inputs
        w_NJ = tl.load(line_ptr + at + j_J[None, :], mask=there_N[:, None] & inside_J[None, :], other=0.0)
        x_J = tl.load(x_ptr + at + j_J, mask=inside_J, other=0.0)
        sum_NJ += w_NJ.to(tl.float32) * x_J.to(tl.float32)[None, :]
    y_N += tl.sum(sum_NJ, 1)
    if bias_ptr is not None:
        y_N += tl.load(bias_ptr + n_N, mask=there_N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n_N, y_N.to(y_ptr.dtype.element_ty), mask=there_N)


def one_row(x_K: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, early: bool) -> Tensor:
    """weight @ x + bias, (N,), all contiguous; sums are taken in float32.

    Args:
        early: start before the kernel before this one has ended; only where the hardware can.
    """
    assert all(each is None or each.is_contiguous() for each in (x_K, weight_NK, bias_N))
    num_outputs, num_inputs = weight_NK.shape
    y_N = x_K.new_empty(num_outputs)
    given = x_K, weight_NK, bias_N, y_N, num_inputs, num_outputs
    options = {"launch_pdl": True} if early else {}
    if num_inputs <= _MOST_AT_ONCE:
        programs = min(num_outputs, _PROGRAMS_PER_SM * platform_of(x_K.device).kernel_facts(x_K.device).side_by_side)
        at_once = max(16, triton.next_power_of_2(num_inputs))
        _short_rows[(programs,)](*given, at_once, early, num_warps=2, enable_fp_fusion=True, **options)
    else:
        sizes = _LONG_OUTPUTS, _MOST_AT_ONCE, _LONG_AT_A_TIME, _STAGES
        programs = triton.cdiv(num_outputs, _LONG_OUTPUTS)
        _long_rows[(programs,)](*given, *sizes, early, num_warps=8, enable_fp_fusion=True, **options)
    return y_N
