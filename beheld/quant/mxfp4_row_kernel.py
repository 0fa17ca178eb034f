"""A Triton kernel of a single row's MXFP4 experts: numbers of four bits, widened to float16, times the row in float32.

Of one row, tensor cores would multiply mostly nothing. Each thread takes 16 bytes of an output at a time, which are 16
numbers of one group of 32 inputs and 16 of the next: see mxfp4_kernel.py for the order of bytes and exponents.

Early starts are those of models/expert_row_kernel.py.

Shapes: C choices, E experts, N outputs, K inputs, P pieces of 16 bytes, I numbers of a piece's group (16).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's interpreter has no assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret
# Of a program: outputs, pieces at a time, warps; for the first product and for the summed one. A single warp brings the
# row to its threads without shared memory.
INNER = (4, 32, 1)
SUMMED = (4, 32, 2)


@triton.jit
def _numbers(byte, ASSEMBLY: tl.constexpr):
    """Return the numbers of the lower and of the upper halves in float16, 2^-14 of theirs."""
    if ASSEMBLY:
        lower, upper = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 pair, sign, rest;
            prmt.b32 pair, $4, 0, 0x1404;
            shl.b32 sign, pair, 4;
            shl.b32 rest, pair, 1;
            and.b32 sign, sign, 0x80008000;
            and.b32 rest, rest, 0x0e000e00;
            or.b32 $0, sign, rest;
            shr.b32 rest, pair, 3;
            and.b32 sign, pair, 0x80008000;
            and.b32 rest, rest, 0x0e000e00;
            or.b32 $2, sign, rest;
            prmt.b32 pair, $4, 0, 0x3424;
            shl.b32 sign, pair, 4;
            shl.b32 rest, pair, 1;
            and.b32 sign, sign, 0x80008000;
            and.b32 rest, rest, 0x0e000e00;
            or.b32 $1, sign, rest;
            shr.b32 rest, pair, 3;
            and.b32 sign, pair, 0x80008000;
            and.b32 rest, rest, 0x0e000e00;
            or.b32 $3, sign, rest;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [byte],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = byte.to(tl.uint16)
        lower = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
        upper = (((wide & 128) << 8) | ((wide & 112) << 5)).to(tl.float16, bitcast=True)
    return lower, upper


@triton.jit
def _power(exponent):
    """Return the powers of two that exponents stand for."""
    return tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _row(
    x_ptr,
    weight_ptr,
    exponent_ptr,
    bias_ptr,
    choice_ptr,
    share_ptr,
    y_ptr,
    num_inputs,
    num_pieces,
    num_outputs,
    num_experts,
    choices,
    N: tl.constexpr,
    P: tl.constexpr,
    SUMMED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes N outputs, of one choice or SUMMED over all; the next tile loads during the current one.

    Exponents are read as 16 bits, those of two groups.
    """
    if EARLY:
        if not SUMMED:
            gdc_wait()
        gdc_launch_dependents()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    # Outputs beyond the end are read as the last one, and not written.
    near_N = tl.minimum(n_N, num_outputs - 1)
    p_P = tl.arange(0, P)
    i_I = tl.arange(0, 16)
    slot = 0 if SUMMED else tl.program_id(1)
    tiles = tl.cdiv(num_pieces, P)
    steps = tiles * (choices if SUMMED else 1)
    expert = tl.load(choice_ptr + slot).to(tl.int64)
    near = tl.minimum(expert, num_experts - 1)
    line_N = near * num_outputs + near_N
    w_NPI_ptr = weight_ptr + (line_N * num_pieces * 16)[:, None, None] + (p_P * 16)[None, :, None] + i_I[None, None, :]
    w_NPI = tl.load(w_NPI_ptr, mask=(p_P < num_pieces)[None, :, None], other=0)
    e_NP_ptr = exponent_ptr + (near * (num_pieces // 4) * num_outputs + near_N)[:, None] * 2
    e_NP_ptr += (p_P // 4 * num_outputs * 2 + p_P // 2 % 2)[None, :]
    e_NP = tl.load(e_NP_ptr, mask=(p_P < num_pieces)[None, :], other=0)
    if EARLY and SUMMED:
        gdc_wait()
    y_N = tl.zeros([N], tl.float32)
    part_NP = tl.zeros([N, P], tl.float32)
    for step in range(0, steps):
        tile = step % tiles
        following = tl.minimum(step + 1, steps - 1)
        next_expert = tl.load(choice_ptr + slot + following // tiles).to(tl.int64)
        near = tl.minimum(next_expert, num_experts - 1)
        next_line_N = near * num_outputs + near_N
        next_P = following % tiles * P + p_P
        there_P = next_P < tl.where(step + 1 < steps, num_pieces, 0)
        w_NPI_ptr = weight_ptr + (next_line_N * num_pieces * 16)[:, None, None]
        w_NPI_ptr += (next_P * 16)[None, :, None] + i_I[None, None, :]
        next_NPI = tl.load(w_NPI_ptr, mask=there_P[None, :, None], other=0)
        e_NP_ptr = exponent_ptr + (near * (num_pieces // 4) * num_outputs + near_N)[:, None] * 2
        e_NP_ptr += (next_P // 4 * num_outputs * 2 + next_P // 2 % 2)[None, :]
        next_NP = tl.load(e_NP_ptr, mask=there_P[None, :], other=0)

        own_P = tile * P + p_P
        k_PI = (own_P // 2 * 64 + own_P % 2 * 16)[:, None] + i_I[None, :]
        row_ptr = x_ptr + (step // tiles if SUMMED else 0) * num_inputs
        lower_PI = tl.load(row_ptr + k_PI, mask=k_PI < num_inputs, other=0.0).to(tl.float32)
        upper_PI = tl.load(row_ptr + k_PI + 32, mask=k_PI + 32 < num_inputs, other=0.0).to(tl.float32)
        lower_NPI, upper_NPI = _numbers(w_NPI, ASSEMBLY)
        lower_NP = tl.sum(lower_NPI.to(tl.float32) * lower_PI[None, :, :], 2)
        upper_NP = tl.sum(upper_NPI.to(tl.float32) * upper_PI[None, :, :], 2)
        exponent_NP = e_NP.to(tl.int32)
        part_NP += lower_NP * _power(exponent_NP & 255) + upper_NP * _power((exponent_NP >> 8) & 255)
        if tile == tiles - 1:
            done_N = tl.sum(part_NP, 1) * 16384.0
            if bias_ptr is not None:
                done_N += tl.load(bias_ptr + line_N).to(tl.float32)
            if SUMMED:
                share = tl.load(share_ptr + step // tiles).to(tl.float32)
                y_N += tl.where(expert < num_experts, done_N * share, 0.0)
            else:
                y_N += done_N
            part_NP = tl.zeros([N, P], tl.float32)
        w_NPI = next_NPI
        e_NP = next_NP
        line_N = next_line_N
        expert = next_expert
    tl.store(y_ptr + slot * num_outputs + n_N, y_N.to(y_ptr.dtype.element_ty), mask=n_N < num_outputs)


def row(
    x_CK: Tensor,
    weight_ENJ: Tensor,
    exponent_EXN: Tensor,
    bias_EN: Tensor | None,
    choice_C: Tensor,
    share_C: Tensor | None,
    *,
    early: bool,
) -> Tensor:
    """Return (C, N), a row times each chosen expert's matrix plus its bias, or (N,), their sum by shares.

    Sums are in float32. An expert that does not exist (E or more) adds nothing to the sum.

    Args:
        x_CK: one row (1, K), or with shares one for each choice; and all others are contiguous.
        weight_ENJ, exponent_EXN: see mxfp4_kernel.py.
        choice_C: with shares what the last call without shares took.
        early: start before the previous kernel ends; only if the hardware can.
    """
    given = x_CK, weight_ENJ, exponent_EXN, bias_EN, choice_C, share_C
    assert all(each is None or each.is_contiguous() for each in given)
    experts, outputs, half = weight_ENJ.shape
    choices, summed = choice_C.numel(), share_C is not None
    y = x_CK.new_empty(outputs if summed else (choices, outputs))
    block, pieces, warps = SUMMED if summed else INNER
    _row[(triton.cdiv(outputs, block), 1 if summed else choices)](
        x_CK,
        weight_ENJ,
        exponent_EXN.view(torch.uint16),
        bias_EN,
        choice_C,
        share_C,
        y,
        x_CK.shape[1],
        half // 16,
        outputs,
        experts,
        choices,
        block,
        pieces,
        summed,
        _ASSEMBLY,
        early,
        num_warps=warps,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if early else {}),
    )
    return y
