"""Triton kernels of a single row's experts, with one more that every row takes: a gated MLP in two launches.

The kernels of expert_row_kernel.py compute the chosen experts alone, with a launch for what stands between the two
products. Here a program multiplies with the gate's and the other half's row of a unit, and writes the gated number. The
shared expert's units come first, so that their weights are read while the experts are still being chosen; its outputs
are added to the others', and both to the residual. Both kernels start before the previous one ends, as those of
expert_row_kernel.py do:

    inner    read shared weights  wait  signal  compute
    outer    signal  read choices, weights  wait  compute      choices are there: `inner` has waited for them

Shapes: C choices, E experts, I units of an expert, S units of the shared expert, H hidden size; inputs are A and B of
them, so that few lanes have none.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beheld.models.one_row_kernel import _options
from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.platform.registry import platform_of

# Warps of `inner` that run at once on a multiprocessor: with 2,048 inputs a thread has 69 registers (Triton 3.6).
_INNER_WARPS_PER_SM = 28
# Numbers of matrices that a thread of four warps holds at most.
_PER_THREAD = 72


@triton.jit
def _act(g, TANH: tl.constexpr):
    """Return SiLU of float32 numbers, or GELU in its tanh approximation; see one_row_kernel.py's gate."""
    if TANH:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        a = 0.5 * g * (2.0 / (1.0 + tl.exp(tl.minimum(-2.0 * inner, 80.0))))
    else:
        a = g / (1.0 + tl.exp(tl.minimum(-g, 80.0)))
    return a


@triton.jit
def _line(
    item, choice_ptr, weight_ptr, shared_ptr, num_inputs, units, shared_units, num_experts, choices,
):  # fmt: skip
    """Return where an item's two rows begin."""
    routed = tl.maximum(item - shared_units, 0)
    # An expert that does not exist is read as the last; its outputs count for nothing.
    expert = tl.load(choice_ptr + tl.minimum(routed // units, choices - 1))
    expert = tl.minimum(expert.to(tl.int64), num_experts - 1)
    own_ptr = weight_ptr + (expert * 2 * units + routed % units) * num_inputs
    common_ptr = shared_ptr + tl.minimum(item, shared_units).to(tl.int64) * num_inputs
    shared = item < shared_units
    gate_ptr = tl.where(shared, common_ptr, own_ptr)
    return gate_ptr, tl.where(shared, shared_units, units).to(tl.int64) * num_inputs


@triton.jit
def _inner(
    x_ptr,
    weight_ptr,
    shared_ptr,
    choice_ptr,
    y_ptr,
    num_inputs,
    units,
    shared_units,
    num_experts,
    choices,
    A: tl.constexpr,
    B: tl.constexpr,
    TANH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes units in turn; the next weights load while the current ones are summed.

    There are at most as many programs as the shared expert has units.
    """
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    total = shared_units + choices * units
    a_A = tl.arange(0, A)
    b_B = A + tl.arange(0, B if B > 0 else 16)
    gate_ptr = shared_ptr + first.to(tl.int64) * num_inputs
    up_ptr = gate_ptr + shared_units.to(tl.int64) * num_inputs
    g_A = tl.load(gate_ptr + a_A, mask=a_A < num_inputs, other=0.0)
    u_A = tl.load(up_ptr + a_A, mask=a_A < num_inputs, other=0.0)
    if B > 0:
        g_B = tl.load(gate_ptr + b_B, mask=b_B < num_inputs, other=0.0)
        u_B = tl.load(up_ptr + b_B, mask=b_B < num_inputs, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    x_A = tl.load(x_ptr + a_A, mask=a_A < num_inputs, other=0.0).to(tl.float32)
    if B > 0:
        x_B = tl.load(x_ptr + b_B, mask=b_B < num_inputs, other=0.0).to(tl.float32)
    for item in range(first, total, programs):
        following = tl.minimum(item + programs, total - 1)
        inside = tl.where(item + programs < total, num_inputs, 0)
        gate_ptr, step = _line(
            following, choice_ptr, weight_ptr, shared_ptr, num_inputs, units, shared_units, num_experts, choices
        )
        next_g_A = tl.load(gate_ptr + a_A, mask=a_A < inside, other=0.0)
        next_u_A = tl.load(gate_ptr + step + a_A, mask=a_A < inside, other=0.0)
        g = tl.sum(g_A.to(tl.float32) * x_A, 0)
        u = tl.sum(u_A.to(tl.float32) * x_A, 0)
        if B > 0:
            next_g_B = tl.load(gate_ptr + b_B, mask=b_B < inside, other=0.0)
            next_u_B = tl.load(gate_ptr + step + b_B, mask=b_B < inside, other=0.0)
            g += tl.sum(g_B.to(tl.float32) * x_B, 0)
            u += tl.sum(u_B.to(tl.float32) * x_B, 0)
            g_B = next_g_B
            u_B = next_u_B
        # Rounded as if each operation ran alone.
        a = _act(g.to(y_ptr.dtype.element_ty).to(tl.float32), TANH).to(y_ptr.dtype.element_ty).to(tl.float32)
        y = a * u.to(y_ptr.dtype.element_ty).to(tl.float32)
        tl.store(y_ptr + item, y.to(y_ptr.dtype.element_ty))
        g_A = next_g_A
        u_A = next_u_A


@triton.jit
def _outer(
    x_ptr,
    weight_ptr,
    shared_ptr,
    choice_ptr,
    share_ptr,
    residual_ptr,
    y_ptr,
    units,
    shared_units,
    num_outputs,
    num_experts,
    C: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    SA: tl.constexpr,
    SB: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes one output of all experts; SA, SB are the shared expert's A and B."""
    if EARLY:
        gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    a_A = tl.arange(0, A)
    b_B = A + tl.arange(0, B if B > 0 else 16)
    a_SA = tl.arange(0, SA)
    b_SB = SA + tl.arange(0, SB if SB > 0 else 16)
    line_ptr = shared_ptr + n * shared_units
    s_SA = tl.load(line_ptr + a_SA, mask=a_SA < shared_units, other=0.0)
    if SB > 0:
        s_SB = tl.load(line_ptr + b_SB, mask=b_SB < shared_units, other=0.0)
    # Triton does not unpack tuples.
    w_A = ()
    w_B = ()
    for c in tl.static_range(C):
        # From L2: before the wait L1 may still hold another layer's choices.
        expert = tl.minimum(tl.load(choice_ptr + c, cache_modifier=".cg").to(tl.int64), num_experts - 1)
        line_ptr = weight_ptr + (expert * num_outputs + n) * units
        w_A = w_A + (tl.load(line_ptr + a_A, mask=a_A < units, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        if B > 0:
            w_B = w_B + (tl.load(line_ptr + b_B, mask=b_B < units, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    if EARLY:
        gdc_wait()
    x_SA = tl.load(x_ptr + a_SA, mask=a_SA < shared_units, other=0.0).to(tl.float32)
    shared = tl.sum(s_SA.to(tl.float32) * x_SA, 0)
    if SB > 0:
        x_SB = tl.load(x_ptr + b_SB, mask=b_SB < shared_units, other=0.0).to(tl.float32)
        shared += tl.sum(s_SB.to(tl.float32) * x_SB, 0)
    sum_A = tl.zeros([A], tl.float32)
    sum_B = tl.zeros([B if B > 0 else 16], tl.float32)
    for c in tl.static_range(C):
        row_ptr = x_ptr + shared_units + c * units
        there = tl.load(choice_ptr + c) < num_experts
        share = tl.where(there, tl.load(share_ptr + c).to(tl.float32), 0.0)
        x_A = tl.load(row_ptr + a_A, mask=a_A < units, other=0.0).to(tl.float32)
        sum_A += w_A[c].to(tl.float32) * (x_A * share)
        if B > 0:
            x_B = tl.load(row_ptr + b_B, mask=b_B < units, other=0.0).to(tl.float32)
            sum_B += w_B[c].to(tl.float32) * (x_B * share)
    y = tl.sum(sum_A, 0)
    if B > 0:
        y += tl.sum(sum_B, 0)
    y = y.to(y_ptr.dtype.element_ty).to(tl.float32) + shared.to(y_ptr.dtype.element_ty).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty).to(tl.float32) + tl.load(residual_ptr + n).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))


def inner(x_H: Tensor, weight_EDH: Tensor, shared_DH: Tensor, choice_C: Tensor, *, tanh: bool, early: bool) -> Tensor:
    """Return gated units: those of the shared expert (S), then those of each choice (C I); sums are in float32.

    Args:
        weight_EDH, shared_DH: the gate's rows and the other half's; D is 2 I, or 2 S. All are contiguous.
        tanh: GELU in its tanh approximation; otherwise SiLU.
        early: start before the previous kernel ends; only if the hardware can.
    """
    assert all(each.is_contiguous() for each in (x_H, weight_EDH, shared_DH, choice_C))
    experts, both, inputs = weight_EDH.shape
    units, shared_units, choices = both // 2, len(shared_DH) // 2, choice_C.numel()
    y = x_H.new_empty(shared_units + choices * units)
    parts = _lanes(inputs)
    warps = _warps(2 * sum(parts))
    most = _INNER_WARPS_PER_SM // warps * platform_of(x_H.device).kernel_facts(x_H.device).side_by_side
    items = len(y)
    programs = min(shared_units, triton.cdiv(items, triton.cdiv(items, most)))
    given = x_H, weight_EDH, shared_DH, choice_C, y, inputs, units, shared_units, experts, choices
    _inner[(programs,)](*given, *parts, tanh, early, num_warps=warps, enable_fp_fusion=True, **_options(early))
    return y


def outer(
    x: Tensor,
    weight_EHI: Tensor,
    shared_HS: Tensor,
    choice_C: Tensor,
    share_C: Tensor,
    residual_H: Tensor,
    *,
    early: bool,
) -> Tensor:
    """Return (H,): residual + shared expert + the sum over choices; an expert that does not exist adds nothing.

    Args:
        x: what `inner` returned, which took `choice_C`.
        early: see `inner`.
    """
    assert all(each.is_contiguous() for each in (x, weight_EHI, shared_HS, choice_C, share_C, residual_H))
    experts, outputs, units = weight_EHI.shape
    shared_units, choices = shared_HS.shape[1], choice_C.numel()
    y_H = x.new_empty(outputs)
    parts, own = _lanes(units), _lanes(shared_units)
    given = x, weight_EHI, shared_HS, choice_C, share_C, residual_H, y_H, units, shared_units, outputs, experts
    warps = _warps(choices * sum(parts) + sum(own))
    _outer[(outputs,)](*given, choices, *parts, *own, early, num_warps=warps, enable_fp_fusion=True, **_options(early))
    return y_H


def _lanes(inputs: int) -> tuple[int, int]:
    """Return lanes for so many inputs in two powers of two, the second for those that are more; 0: none."""
    most = max(16, 1 << (inputs.bit_length() - 1))
    return most, max(16, triton.next_power_of_2(inputs - most)) if inputs > most else 0


def _warps(numbers: int) -> int:
    """Return the warps of a program that holds so many numbers of weights."""
    return 4 if numbers <= 4 * 32 * _PER_THREAD else 8
