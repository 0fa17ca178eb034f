"""Triton kernels of a single row's experts: vectors times the matrices of the chosen experts, found on the GPU.

A kernel for many rows sorts them by expert and multiplies tiles of rows; with one row, each tile would hold just that
row. Here each program reads the weights of single outputs, as in one_row_kernel.py, from the matrix of the chosen
expert. No other kernel sorts, copies or adds up anything.

Both kernels start before the previous one ends, see one_row_kernel.py:

    inner    wait  signal  compute                  what follows starts only once the choices are there
    outer    signal  read choices, weights  wait    so it may read the choices, which `inner` has waited for
             compute

Shapes: C choices, E experts, N outputs, K inputs, in two parts of A and B lanes, so that
few lanes are empty.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beheld.models.one_row_kernel import _BOUNDED, _options
from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.platform.registry import platform_of

# Inputs that two warps take; more take more warps, up to eight.
PER_TWO_WARPS = 2048
INNER_WARPS_PER_SM, OUTER_WARPS_PER_SM = 24, 32
# With this many registers for each thread, that many warps fit.
_MOST_REGISTERS = 80


@triton.jit
def _inner(
    x_ptr,
    weight_ptr,
    bias_ptr,
    choice_ptr,
    y_ptr,
    num_inputs,
    num_outputs,
    num_experts,
    choices,
    A: tl.constexpr,
    B: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes outputs of all choices in turn; the next weights load while the current ones are summed."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    total = choices * num_outputs
    a_A = tl.arange(0, A)
    x_A = tl.load(x_ptr + a_A, mask=a_A < num_inputs, other=0.0).to(tl.float32)
    # An expert that does not exist is read as the last; its outputs count for nothing.
    expert = tl.minimum(tl.load(choice_ptr + first // num_outputs).to(tl.int64), num_experts - 1)
    line = expert * num_outputs + first % num_outputs
    line_ptr = weight_ptr + line * num_inputs
    w_A = tl.load(line_ptr + a_A, mask=a_A < num_inputs, other=0.0)
    if B > 0:
        b_B = A + tl.arange(0, B)
        x_B = tl.load(x_ptr + b_B, mask=b_B < num_inputs, other=0.0).to(tl.float32)
        w_B = tl.load(line_ptr + b_B, mask=b_B < num_inputs, other=0.0)
    for item in range(first, total, programs):
        following = tl.minimum(item + programs, total - 1)
        inside = tl.where(item + programs < total, num_inputs, 0)
        next_expert = tl.minimum(tl.load(choice_ptr + following // num_outputs).to(tl.int64), num_experts - 1)
        next_line = next_expert * num_outputs + following % num_outputs
        next_ptr = weight_ptr + next_line * num_inputs
        next_A = tl.load(next_ptr + a_A, mask=a_A < inside, other=0.0)
        if B > 0:
            next_B = tl.load(next_ptr + b_B, mask=b_B < inside, other=0.0)
        y = tl.sum(w_A.to(tl.float32) * x_A, 0)
        if B > 0:
            y += tl.sum(w_B.to(tl.float32) * x_B, 0)
            w_B = next_B
        if bias_ptr is not None:
            y += tl.load(bias_ptr + line).to(tl.float32)
        tl.store(y_ptr + item, y.to(y_ptr.dtype.element_ty))
        w_A = next_A
        line = next_line


@triton.jit
def _outer(
    x_ptr,
    weight_ptr,
    bias_ptr,
    choice_ptr,
    share_ptr,
    y_ptr,
    num_inputs,
    num_outputs,
    num_experts,
    choices,
    A: tl.constexpr,
    B: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program sums outputs over all choices; the next weights load while the current ones are summed."""
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    a_A = tl.arange(0, A)
    # From L2: before the wait L1 may still hold another layer's choices.
    expert = tl.load(choice_ptr, cache_modifier=".cg").to(tl.int64)
    line = tl.minimum(expert, num_experts - 1) * num_outputs + first
    line_ptr = weight_ptr + line * num_inputs
    w_A = tl.load(line_ptr + a_A, mask=a_A < num_inputs, other=0.0)
    if B > 0:
        b_B = A + tl.arange(0, B)
        w_B = tl.load(line_ptr + b_B, mask=b_B < num_inputs, other=0.0)
    if EARLY:
        gdc_wait()
    for n in range(first, num_outputs, programs):
        y = 0.0
        for choice in range(choices):
            last = choice == choices - 1
            following = tl.where(last, n + programs, n)
            inside = tl.where(following < num_outputs, num_inputs, 0)
            next_expert = tl.load(choice_ptr + tl.where(last, 0, choice + 1), cache_modifier=".cg").to(tl.int64)
            next_line = tl.minimum(next_expert, num_experts - 1) * num_outputs + tl.minimum(following, num_outputs - 1)
            next_ptr = weight_ptr + next_line * num_inputs
            next_A = tl.load(next_ptr + a_A, mask=a_A < inside, other=0.0)
            if B > 0:
                next_B = tl.load(next_ptr + b_B, mask=b_B < inside, other=0.0)
            row_ptr = x_ptr + choice * num_inputs
            x_A = tl.load(row_ptr + a_A, mask=a_A < num_inputs, other=0.0).to(tl.float32)
            part = tl.sum(w_A.to(tl.float32) * x_A, 0)
            if B > 0:
                x_B = tl.load(row_ptr + b_B, mask=b_B < num_inputs, other=0.0).to(tl.float32)
                part += tl.sum(w_B.to(tl.float32) * x_B, 0)
                w_B = next_B
            if bias_ptr is not None:
                part += tl.load(bias_ptr + line).to(tl.float32)
            share = tl.load(share_ptr + choice).to(tl.float32)
            y += tl.where(expert < num_experts, part * share, 0.0)
            w_A = next_A
            line = next_line
            expert = next_expert
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))  # type: ignore[attr-defined]


def inner(x_K: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, choice_C: Tensor, *, early: bool) -> Tensor:
    """Return (C, N): the row times each chosen expert's matrix, plus its bias; sums are in float32.

    Outputs of an expert that does not exist (E or more) are finite where the last expert's are.

    Args:
        weight_ENK: and all others are contiguous.
        early: start before the previous kernel ends; only if the hardware can.
    """
    assert all(each is None or each.is_contiguous() for each in (x_K, weight_ENK, bias_EN, choice_C))
    experts, outputs, inputs = weight_ENK.shape
    choices = choice_C.numel()
    y_CN = x_K.new_empty((choices, outputs))
    given = x_K, weight_ENK, bias_EN, choice_C, y_CN, inputs, outputs, experts, choices
    parts, options = _program(inputs)
    programs = _programs(choices * outputs, INNER_WARPS_PER_SM // options["num_warps"], x_K)
    _inner[(programs,)](*given, *parts, early, enable_fp_fusion=True, **options, **_options(early))
    return y_CN


def outer(
    x_CK: Tensor,
    weight_ENK: Tensor,
    bias_EN: Tensor | None,
    choice_C: Tensor,
    share_C: Tensor,
    *,
    early: bool,
) -> Tensor:
    """Return (N,): the sum over choices of share * (matrix @ x + bias); an expert that does not exist adds nothing.

    Args:
        choice_C: what the last `inner` took.
        early: see `inner`.
    """
    assert all(each is None or each.is_contiguous() for each in (x_CK, weight_ENK, bias_EN, choice_C, share_C))
    experts, outputs, inputs = weight_ENK.shape
    y_N = x_CK.new_empty(outputs)
    given = x_CK, weight_ENK, bias_EN, choice_C, share_C, y_N, inputs, outputs, experts, choice_C.numel()
    parts, options = _program(inputs)
    programs = _programs(outputs, OUTER_WARPS_PER_SM // options["num_warps"], x_CK)
    _outer[(programs,)](*given, *parts, early, enable_fp_fusion=True, **options, **_options(early))
    return y_N


def _program(inputs: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the two parts of the inputs, and the size of a program."""
    most = max(16, 1 << (inputs.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(inputs - most)) if inputs > most else 0
    warps = 2
    while warps < 8 and most + rest > PER_TWO_WARPS * warps // 2:
        warps *= 2
    options = {"num_warps": warps}
    fits = most + rest <= PER_TWO_WARPS * warps // 2
    return (most, rest), options | {"maxnreg": _MOST_REGISTERS} if _BOUNDED and fits else options


def _programs(items: int, per_multiprocessor: int, x: Tensor) -> int:
    """Return the number of programs, each with about as many items."""
    most = per_multiprocessor * platform_of(x.device).kernel_facts(x.device).side_by_side
    return triton.cdiv(items, triton.cdiv(items, most))
