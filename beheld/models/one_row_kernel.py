"""Triton kernels of a single row: products, and the operations between them in a decoder layer.

A product is a vector times a matrix stored output by output; norms, rotations and gates come between products.

A kernel lets the next one start by a signal, and waits for the end of the previous one by another instruction
("programmatic dependent launch"). Here each kernel signals first and then waits before it reads anything but weights,
which no kernel writes:

    product      signal  read weights  wait  compute
    norm         signal  read weights  wait  compute
    others       signal  wait  compute                    so their successor reads weights meanwhile

Waiting covers all earlier kernels, because each of them has waited too: a kernel that did not wait would break this for
its successors. Data that is read before the wait must come from before the last kernel that did not start early (a
library's, or the first of a graph): a signal does not mean that earlier kernels have ended.

Each operation rounds to the row's type, as if PyTorch ran it alone.

Shapes: N outputs of a program, K inputs, J inputs read at a time, H hidden size, C head size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.platform.registry import platform_of
from beheld.utils.version import numbers_of

# How many weights of an output a program reads at once: all of them, up to this number.
_MOST_AT_ONCE = 4096
# Measured on an H200: programs per multiprocessor for short rows, by the weights of a row, the warps of each, and the
# registers of a thread with which as many programs run at once. For long rows each program has eight warps.
_SHORT = {
    # (lanes, further lanes): (programs, warps, registers)
    (2048, 0): (12, 2, 80),
    (2048, 512): (10, 2, 96),
    (2048, 1024): (8, 2, 128),
    (4096, 0): (6, 4, 80),
}
# Rows of up to 2,048 weights need 76 registers, but Triton 3.8 takes 85, and then the twelfth program waits for the end
# of the others, and a token takes 6 % longer (3B, H100). With 3.6, a bound makes small products 4 to 8 % slower.
_BOUNDED = numbers_of(triton.__version__) >= (3, 7)
_LONG_OUTPUTS = 4
_LONG_AT_A_TIME = 1024
_STAGES = 4


@triton.jit
def _short_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_inputs,
    num_outputs,
    K: tl.constexpr,
    L: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes outputs in turn; the next output's weights load while the current one's are summed.

    K, L: lanes for the inputs, and further ones for those that are more than K (0: none).
    EARLY: this kernel may start before the previous one ends; weights are always valid.
    """
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    k_K = tl.arange(0, K)
    line_ptr = weight_ptr + first.to(tl.int64) * num_inputs
    w_K = tl.load(line_ptr + k_K, mask=k_K < num_inputs, other=0.0)
    if L:
        l_L = K + tl.arange(0, L)
        w_L = tl.load(line_ptr + l_L, mask=l_L < num_inputs, other=0.0)
    if EARLY:
        gdc_wait()
    x_K = tl.load(x_ptr + k_K, mask=k_K < num_inputs, other=0.0).to(tl.float32)
    if L:
        x_L = tl.load(x_ptr + l_L, mask=l_L < num_inputs, other=0.0).to(tl.float32)
    for n in range(first, num_outputs, programs):
        following = n + programs
        next_ptr = weight_ptr + following.to(tl.int64) * num_inputs
        stop = tl.where(following < num_outputs, num_inputs, 0)
        next_K = tl.load(next_ptr + k_K, mask=k_K < stop, other=0.0)
        y = tl.sum(w_K.to(tl.float32) * x_K, 0)
        if L:
            next_L = tl.load(next_ptr + l_L, mask=l_L < stop, other=0.0)
            y += tl.sum(w_L.to(tl.float32) * x_L, 0)
            w_L = next_L
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n).to(tl.float32)
        if residual_ptr is not None:
            y = y.to(y_ptr.dtype.element_ty).to(tl.float32) + tl.load(residual_ptr + n).to(tl.float32)
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))
        w_K = next_K


@triton.jit
def _long_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_inputs,
    num_outputs,
    N: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes N outputs; the first K weights of each load directly, others through shared memory."""
    if EARLY:
        gdc_launch_dependents()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    k_K = tl.arange(0, K)
    there_N = n_N < num_outputs
    line_ptr = weight_ptr + n_N[:, None].to(tl.int64) * num_inputs
    w_NK = tl.load(line_ptr + k_K[None, :], mask=there_N[:, None] & (k_K < num_inputs)[None, :], other=0.0)
    if EARLY:
        gdc_wait()
    x_K = tl.load(x_ptr + k_K, mask=k_K < num_inputs, other=0.0).to(tl.float32)
    j_J = tl.arange(0, J)
    y_N = tl.sum(w_NK.to(tl.float32) * x_K[None, :], 1)
    sum_NJ = tl.zeros([N, J], tl.float32)
    for at in tl.range(K, num_inputs, J, num_stages=STAGES):
        inside_J = at + j_J < num_inputs
        w_NJ = tl.load(line_ptr + at + j_J[None, :], mask=there_N[:, None] & inside_J[None, :], other=0.0)
        x_J = tl.load(x_ptr + at + j_J, mask=inside_J, other=0.0).to(tl.float32)
        sum_NJ += w_NJ.to(tl.float32) * x_J[None, :]
    y_N += tl.sum(sum_NJ, 1)
    if bias_ptr is not None:
        y_N += tl.load(bias_ptr + n_N, mask=there_N, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        y_N = y_N.to(y_ptr.dtype.element_ty).to(tl.float32)
        y_N += tl.load(residual_ptr + n_N, mask=there_N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n_N, y_N.to(y_ptr.dtype.element_ty), mask=there_N)


def one_row(
    x_K: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    *,
    early: bool,
    residual_N: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return weight @ x + bias (+ residual), (N,), all contiguous; sums are in float32.

    Args:
        early: start before the previous kernel ends; only if the hardware can.
        dtype: of the result; None: of x.
    """
    assert all(each is None or each.is_contiguous() for each in (x_K, weight_NK, bias_N, residual_N))
    num_outputs, num_inputs = weight_NK.shape
    y_N = x_K.new_empty(num_outputs, dtype=dtype)
    given = x_K, weight_NK, bias_N, residual_N, y_N, num_inputs, num_outputs
    options = _options(early)
    if num_inputs <= _MOST_AT_ONCE:
        lanes = _lanes(num_inputs)
        programs, short = _short_options(lanes)
        programs = min(num_outputs, programs * platform_of(x_K.device).kernel_facts(x_K.device).side_by_side)
        _short_rows[(programs,)](*given, *lanes, early, enable_fp_fusion=True, **options, **short)
    else:
        sizes = _LONG_OUTPUTS, _MOST_AT_ONCE, _LONG_AT_A_TIME, _STAGES
        programs = triton.cdiv(num_outputs, _LONG_OUTPUTS)
        _long_rows[(programs,)](*given, *sizes, early, num_warps=8, enable_fp_fusion=True, **options)
    return y_N


@triton.jit
def _norm(
    x_ptr, weight_ptr, residual_ptr, y_ptr, size, eps, K: tl.constexpr, FROM_ONE: tl.constexpr, EARLY: tl.constexpr
):
    """One program normalizes the whole row. FROM_ONE: weights are offsets from one, applied before rounding (Gemma)."""
    if EARLY:
        gdc_launch_dependents()
    k_K = tl.arange(0, K)
    inside_K = k_K < size
    w_K = tl.load(weight_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    x_K = tl.load(x_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
    x_K *= tl.rsqrt(tl.sum(x_K * x_K, 0) / size + eps)
    if not FROM_ONE:
        x_K = x_K.to(y_ptr.dtype.element_ty).to(tl.float32)
    y_K = x_K * (w_K + (1.0 if FROM_ONE else 0.0))
    if residual_ptr is not None:
        y_K = y_K.to(y_ptr.dtype.element_ty).to(tl.float32)
        y_K += tl.load(residual_ptr + k_K, mask=inside_K, other=0.0).to(tl.float32)
    tl.store(y_ptr + k_K, y_K.to(y_ptr.dtype.element_ty), mask=inside_K)


def norm(
    x_H: Tensor, weight_H: Tensor, eps: float, *, from_one: bool, early: bool, residual_H: Tensor | None = None
) -> Tensor:
    """Return the RMS norm of one row (H,), added to `residual_H` if given; all contiguous.

    Args:
        from_one: see `_norm`.
        early: see `one_row`.
    """
    assert all(each is None or each.is_contiguous() for each in (x_H, weight_H, residual_H))
    y_H = torch.empty_like(x_H)
    block = triton.next_power_of_2(x_H.numel())
    warps = min(16, max(1, block // 512))
    given = x_H, weight_H, residual_H, y_H, x_H.numel(), eps
    _norm[(1,)](*given, block, from_one, early, num_warps=warps, enable_fp_fusion=True, **_options(early))
    return y_H


@triton.jit
def _turn(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    weights_ptr,
    q_heads,
    size,
    apart,
    turned,
    eps,
    C: tl.constexpr,
    FROM_ONE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program handles a head of q or k, in place; its first `turned` elements are rotated, half against half.

    Heads of q begin `apart` elements from each other, those of k follow one another behind them.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    c_C = tl.arange(0, C)
    inside_C = c_C < size
    rotated_C = c_C < turned
    half = turned // 2
    first_C = c_C < half
    other_C = tl.where(rotated_C, tl.where(first_C, c_C + half, c_C - half), c_C)
    base_ptr = qkv_ptr + tl.minimum(head, q_heads) * apart + tl.maximum(head - q_heads, 0) * size
    x_C = tl.load(base_ptr + c_C, mask=inside_C, other=0.0).to(tl.float32)
    y_C = tl.load(base_ptr + other_C, mask=inside_C, other=0.0).to(tl.float32)
    if weights_ptr is not None:
        scale = tl.rsqrt(tl.sum(x_C * x_C, 0) / size + eps)
        weight_ptr = weights_ptr + tl.where(head < q_heads, 0, size)
        w_C = tl.load(weight_ptr + c_C, mask=inside_C, other=0.0).to(tl.float32)
        v_C = tl.load(weight_ptr + other_C, mask=inside_C, other=0.0).to(tl.float32)
        if FROM_ONE:
            x_C = x_C * scale * (1.0 + w_C)
            y_C = y_C * scale * (1.0 + v_C)
        else:
            x_C = (x_C * scale).to(qkv_ptr.dtype.element_ty).to(tl.float32) * w_C
            y_C = (y_C * scale).to(qkv_ptr.dtype.element_ty).to(tl.float32) * v_C
        x_C = x_C.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        y_C = y_C.to(qkv_ptr.dtype.element_ty).to(tl.float32)
    cos_C = tl.load(cos_ptr + c_C, mask=rotated_C, other=1.0).to(tl.float32)
    sin_C = tl.load(sin_ptr + c_C, mask=rotated_C, other=0.0).to(tl.float32)
    own_C = (x_C * cos_C).to(qkv_ptr.dtype.element_ty).to(tl.float32)
    cross_C = (tl.where(first_C, -y_C, y_C) * sin_C).to(qkv_ptr.dtype.element_ty).to(tl.float32)
    # Every element is read by other threads before it is written.
    tl.debug_barrier()
    tl.store(base_ptr + c_C, (own_C + cross_C).to(qkv_ptr.dtype.element_ty), mask=inside_C)


def turn(
    qkv: Tensor,
    heads: tuple[int, int],
    cos_C: Tensor,
    sin_C: Tensor,
    norms: tuple[Tensor, float] | None,
    *,
    from_one: bool,
    early: bool,
    gated: bool = False,
) -> None:
    """Normalize and rotate the heads of q and k, in place.

    Args:
        qkv: one row: the heads of q, of k and of v, concatenated.
        heads: the numbers of heads of q and of k.
        gated: each head of q is followed by as many numbers of a gate.
        norms: weights (2, C) of q and of k, and epsilon, if heads are normalized.
        cos_C, sin_C: for all rotated elements of a head, in its type.
    """
    assert all(each.is_contiguous() for each in (qkv, cos_C, sin_C))
    q_heads, k_heads = heads
    size = qkv.numel() // (q_heads * (2 if gated else 1) + 2 * k_heads)
    weights_2C, eps = norms or (None, 0.0)
    given = qkv, cos_C, sin_C, weights_2C, q_heads, size, size * (2 if gated else 1), cos_C.numel(), eps
    block = triton.next_power_of_2(size)
    _turn[(q_heads + k_heads,)](*given, block, from_one, early, num_warps=1, enable_fp_fusion=True, **_options(early))


@triton.jit
def _gate(x_ptr, y_ptr, size, N: tl.constexpr, TANH: tl.constexpr, EARLY: tl.constexpr):
    """One program computes N inner units. TANH: GELU in its tanh approximation; otherwise SiLU."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    inside_N = n_N < size
    g_N = tl.load(x_ptr + n_N, mask=inside_N, other=0.0).to(tl.float32)
    u_N = tl.load(x_ptr + size + n_N, mask=inside_N, other=0.0).to(tl.float32)
    if TANH:
        inner_N = 0.7978845608028654 * (g_N + 0.044715 * g_N * g_N * g_N)
        # tanh(z) = 2 / (1 + exp(-2 z)) - 1
        a_N = 0.5 * g_N * (2.0 / (1.0 + tl.exp(tl.minimum(-2.0 * inner_N, 80.0))))
    else:
        a_N = g_N / (1.0 + tl.exp(tl.minimum(-g_N, 80.0)))
    y_N = a_N.to(y_ptr.dtype.element_ty).to(tl.float32) * u_N
    tl.store(y_ptr + n_N, y_N.to(y_ptr.dtype.element_ty), mask=inside_N)


_GATE_UNITS = 256


def gate(x: Tensor, *, tanh: bool, early: bool) -> Tensor:
    """Return (I,) of one row of (2 I,), contiguous: the activation of the first half times the second half.

    Args:
        tanh: GELU in its tanh approximation; otherwise SiLU.
    """
    assert x.is_contiguous()
    size = x.numel() // 2
    y = x.new_empty(size)
    programs = triton.cdiv(size, _GATE_UNITS)
    _gate[(programs,)](x, y, size, _GATE_UNITS, tanh, early, num_warps=4, enable_fp_fusion=True, **_options(early))
    return y


def _lanes(num_inputs: int) -> tuple[int, int]:
    """Return lanes for so many inputs in two powers of two, where one alone would leave many without work."""
    at_once = max(16, triton.next_power_of_2(num_inputs))
    rest = triton.next_power_of_2(max(1, num_inputs - at_once // 2))
    return (2048, max(512, rest)) if at_once == 4096 and rest <= 1024 else (at_once, 0)


def _short_options(lanes: tuple[int, int]) -> tuple[int, dict[str, int]]:
    """Return the programs per multiprocessor for short rows of so many lanes, and the options of their launch."""
    programs, warps, registers = _SHORT[lanes] if lanes[0] > 2048 or lanes[1] else _SHORT[2048, 0]
    return programs, {"num_warps": warps} | ({"maxnreg": registers} if _BOUNDED else {})


def _options(early: bool) -> dict[str, int]:
    """Return the launch options for an early start; empty where Triton does not support it."""
    return {"launch_pdl": True} if early else {}
