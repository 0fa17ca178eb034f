"""A Triton kernel of a single row's MXFP4 experts: numbers of four bits, widened to bfloat16, times the row.

Widening is what such a kernel spends its time on: a tensor core multiplies and sums within a warp, although seven of
its eight columns repeat the row. Products are exact, and sums are in float32.

Each lane has pieces of two outputs, eight apart. A piece is 16 bytes: 16 numbers of one group of 32 inputs (the lower
halves of bytes) and 16 of the next (the upper ones); see mxfp4_kernel.py for the order of bytes and exponents. A
product of tensor cores (`mma.m16n8k16`) takes, of 16 outputs and 4 pieces, each lane's own four numbers of both
outputs, so that no number leaves its lane. That holds only if lane i has output i / 4 and piece i % 4. Triton places
the elements of a flat tensor so; results are NaN if it ever does not, which the engine's self-test refuses.

A number of four bits is a bfloat16 of its sign, exponent and fraction, times 2^126. The group's exponent brings 2^63 of
that at once. So numbers below 2^-60 lose bits, and factors of 2^65 and more do not fit (`MOST_EXPONENT`).

Early starts are those of models/expert_row_kernel.py.

Shapes: C choices, E experts, N outputs, K inputs, X words of exponents, J bytes of an output, R steps of 4 pieces at a
time, M = 32 C R lanes: a choice, a step, one of 8 outputs and one of 4 pieces.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.quant.lanes_kernel import LANE, four

# Triton's interpreter has no assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret
# Steps at a time; and warps, for the first product and at most for the summed one.
_STEPS = 4
_WARPS, _MOST_WARPS = 1, 16
# Of a word's numbers, four bits each, those in bytes 0 and 2 and those in bytes 1 and 3, first of the lower and then of
# the upper halves: how far left the sign goes to bits 15 and 31, and the rest to bits 6 to 8 and 22 to 24.
_SHIFTS = ((12, 6), (4, -2)), ((8, 2), (0, -6))


def _widen(word: str, sign: int, rest: int, scale: str, to: str) -> str:
    """Return instructions for two numbers of a word, times a scale."""
    moved = f"shl.b32 s, {word}, {sign};" if sign else f"mov.b32 s, {word};"
    moved += f"shl.b32 t, {word}, {rest};" if rest > 0 else f"shr.u32 t, {word}, {-rest};"
    joined = f"and.b32 t, t, 0x01c001c0; lop3.b32 {to}, s, 0x80008000, t, 0xea;"
    # A product is a sum with -0.
    return moved + joined + f"fma.rn.bf16x2 {to}, {to}, {scale}, minus;"


def _instructions() -> str:
    """Return instructions that add the products of one piece of two outputs.

    Operands: 0 to 3 the sums (first output's lower and upper halves, then the second's), 4 to 7 and 8 to 11 the words
    of both outputs, 12 to 15 scales in the order of the sums, 16 to 23 and 24 to 31 the row's numbers for lower and
    upper halves, two each, 32 to 35 the sums so far.
    """
    made = ".reg .b32 s, t, a0, a1, a2, a3, b0, b1, minus; .reg .f32 none1, none3; mov.b32 minus, 0x80008000;"
    made += "".join(f".reg .f32 y{place}; mov.f32 y{place}, ${32 + place};" for place in range(4))
    for number in range(4):
        for half, shifts in enumerate(_SHIFTS):
            x = 16 + 8 * half + 2 * number
            made += "".join(
                f"prmt.b32 b{place}, ${x}, ${x + 1}, {order};" for place, order in enumerate(("0x5410", "0x7632"))
            )
            for place, (sign, rest) in enumerate(shifts):
                for output in range(2):
                    word, scale = f"${4 + 4 * output + number}", f"${12 + 2 * output + half}"
                    made += _widen(word, sign, rest, scale, f"a{2 * place + output}")
            first, second = f"y{half}", f"y{2 + half}"
            made += (
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                f" {{{first}, none1, {second}, none3}}, {{a0, a1, a2, a3}}, {{b0, b1}},"
                f" {{{first}, {first}, {second}, {second}}};"
            )
    made += "".join(f"mov.f32 ${place}, y{place};" for place in range(4))
    return "{" + made + "}"


_MULTIPLY = tl.constexpr(_instructions())
_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 28 + ["f"] * 4))


@triton.jit
def _scales(exponent_M):
    """Return 2^(exponent - 64) of the lower and of the upper halves, twice in a word, in bfloat16."""
    exponent_M = exponent_M.to(tl.int32)
    lower_M = tl.minimum((exponent_M & 255) + 63, 254) * 0x00800080
    upper_M = tl.minimum((exponent_M >> 8) + 63, 254) * 0x00800080
    return lower_M, upper_M


@triton.jit
def _half(x_M, word_M, scale_M, number: tl.constexpr, upper: tl.constexpr):
    """Return the product of number `number` of a word's four in one half, without assembly; x_M has it and another."""
    bits = word_M >> (8 * number + 4 * upper)
    wide = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True)
    x = (x_M & -65536 if number % 2 else x_M << 16).to(tl.float32, bitcast=True)
    return wide * (scale_M & -65536).to(tl.float32, bitcast=True) * x


@triton.jit
def _piece(y_M, word_M, x0_M, x1_M, scale_M, upper: tl.constexpr):
    """Return y plus the products of a word's numbers in one half, without assembly."""
    y_M += _half(x0_M, word_M, scale_M, 0, upper) + _half(x0_M, word_M, scale_M, 1, upper)
    return y_M + _half(x1_M, word_M, scale_M, 2, upper) + _half(x1_M, word_M, scale_M, 3, upper)


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
    C: tl.constexpr,
    R: tl.constexpr,
    SUMMED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes 16 outputs, of one choice or SUMMED over all; the next pieces load during the current ones.

    Bytes and the row are read as words, exponents as 16 bits, those of two groups.
    """
    if EARLY:
        if not SUMMED:
            gdc_wait()
        gdc_launch_dependents()
    M: tl.constexpr = C * R * 32
    m_M = tl.arange(0, M)
    i_4 = tl.arange(0, 4)
    first = tl.program_id(0) * 16
    first_choice = 0 if SUMMED else tl.program_id(1)
    choice_M = m_M // (32 * R) + first_choice
    piece_M = m_M // 32 % R * 4 + m_M % 4
    # Outputs beyond the end are read as the last one, and not written; so are choices, as the last expert.
    n_M = tl.minimum(first + m_M // 4 % 8, num_outputs - 1)
    more_M = tl.minimum(n_M + 8, num_outputs - 1) - n_M
    expert_M = tl.load(choice_ptr + choice_M, mask=choice_M < choices, other=num_experts)
    near_M = tl.minimum(expert_M, num_experts - 1).to(tl.int64)
    w_M4_ptr = weight_ptr + ((near_M * num_outputs + n_M) * num_pieces + piece_M)[:, None] * 4 + i_4[None, :]
    more_M1 = (more_M * num_pieces * 4)[:, None]
    e_M_ptr = exponent_ptr + piece_M // 2 % 2
    e_M_ptr += (near_M * (num_pieces // 4) * num_outputs + n_M + piece_M // 4 * num_outputs) * 2
    there_M = piece_M < num_pieces
    one_M4 = tl.load(w_M4_ptr, mask=there_M[:, None], other=0)
    two_M4 = tl.load(w_M4_ptr + more_M1, mask=there_M[:, None], other=0)
    one_M = tl.load(e_M_ptr, mask=there_M, other=0)
    two_M = tl.load(e_M_ptr + more_M * 2, mask=there_M, other=0)
    if EARLY and SUMMED:
        gdc_wait()
    k_M = piece_M // 2 * 32 + piece_M % 2 * 8
    row_M = tl.minimum(choice_M, choices - 1) if SUMMED else choice_M * 0
    x_M4_ptr = x_ptr + (row_M * (num_inputs // 2) + k_M)[:, None] + i_4[None, :]
    if ASSEMBLY:
        y0_M = tl.inline_asm_elementwise(LANE, "=f,r", [m_M % 32], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y0_M = tl.zeros([M], tl.float32)
    y1_M = y0_M
    y2_M = y0_M
    y3_M = y0_M
    for start in range(0, num_pieces, R * 4):
        w_M4_ptr += R * 16
        e_M_ptr += R * num_outputs * 2
        there_M = piece_M < num_pieces - start - R * 4
        next_one_M4 = tl.load(w_M4_ptr, mask=there_M[:, None], other=0)
        next_two_M4 = tl.load(w_M4_ptr + more_M1, mask=there_M[:, None], other=0)
        next_one_M = tl.load(e_M_ptr, mask=there_M, other=0)
        next_two_M = tl.load(e_M_ptr + more_M * 2, mask=there_M, other=0)
        # The inputs are whole groups: of two, the second may be missing.
        low_M1 = (start * 16 + k_M < num_inputs // 2)[:, None]
        high_M1 = (start * 16 + k_M + 16 < num_inputs // 2)[:, None]
        l0, l1, l2, l3 = four(tl.load(x_M4_ptr, mask=low_M1, other=0))
        l4, l5, l6, l7 = four(tl.load(x_M4_ptr + 4, mask=low_M1, other=0))
        u0, u1, u2, u3 = four(tl.load(x_M4_ptr + 16, mask=high_M1, other=0))
        u4, u5, u6, u7 = four(tl.load(x_M4_ptr + 20, mask=high_M1, other=0))
        x_M4_ptr += R * 64
        a0, a1, a2, a3 = four(one_M4)
        b0, b1, b2, b3 = four(two_M4)
        s0, s1 = _scales(one_M)
        s2, s3 = _scales(two_M)
        if ASSEMBLY:
            y0_M, y1_M, y2_M, y3_M = tl.inline_asm_elementwise(
                _MULTIPLY,
                _OPERANDS,
                [a0, a1, a2, a3, b0, b1, b2, b3, s0, s1, s2, s3]  # noqa: RUF005 (Triton unpacks no lists)
                + [l0, l1, l2, l3, l4, l5, l6, l7, u0, u1, u2, u3, u4, u5, u6, u7, y0_M, y1_M, y2_M, y3_M],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
        else:
            y0_M = _piece(_piece(y0_M, a0, l0, l1, s0, False), a1, l2, l3, s0, False)
            y0_M = _piece(_piece(y0_M, a2, l4, l5, s0, False), a3, l6, l7, s0, False)
            y1_M = _piece(_piece(y1_M, a0, u0, u1, s1, True), a1, u2, u3, s1, True)
            y1_M = _piece(_piece(y1_M, a2, u4, u5, s1, True), a3, u6, u7, s1, True)
            y2_M = _piece(_piece(y2_M, b0, l0, l1, s2, False), b1, l2, l3, s2, False)
            y2_M = _piece(_piece(y2_M, b2, l4, l5, s2, False), b3, l6, l7, s2, False)
            y3_M = _piece(_piece(y3_M, b0, u0, u1, s3, True), b1, u2, u3, s3, True)
            y3_M = _piece(_piece(y3_M, b2, u4, u5, s3, True), b3, u6, u7, s3, True)
        one_M4 = next_one_M4
        two_M4 = next_two_M4
        one_M = next_one_M
        two_M = next_two_M
    # 2^63 is left of the scales; a tensor core gives each of four lanes the sum of them all.
    left = 9223372036854775808.0 * (0.25 if ASSEMBLY else 1.0)
    one_C8 = tl.sum(tl.sum(tl.reshape(y0_M + y1_M, [C, R, 8, 4]), 3), 1) * left
    two_C8 = tl.sum(tl.sum(tl.reshape(y2_M + y3_M, [C, R, 8, 4]), 3), 1) * left
    choice_C = tl.arange(0, C) + first_choice
    expert_C = tl.load(choice_ptr + choice_C, mask=choice_C < choices, other=num_experts)
    n_8 = first + tl.arange(0, 8)
    if bias_ptr is not None:
        b_C8_ptr = bias_ptr + (tl.minimum(expert_C, num_experts - 1) * num_outputs)[:, None] + n_8[None, :]
        one_C8 += tl.load(b_C8_ptr, mask=(n_8 < num_outputs)[None, :], other=0.0).to(tl.float32)
        two_C8 += tl.load(b_C8_ptr + 8, mask=(n_8 + 8 < num_outputs)[None, :], other=0.0).to(tl.float32)
    if SUMMED:
        share_C = tl.load(share_ptr + choice_C, mask=choice_C < choices, other=0.0).to(tl.float32)
        known_C1 = (expert_C < num_experts)[:, None]
        one_8 = tl.sum(tl.where(known_C1, one_C8 * share_C[:, None], 0.0), 0)
        two_8 = tl.sum(tl.where(known_C1, two_C8 * share_C[:, None], 0.0), 0)
        tl.store(y_ptr + n_8, one_8.to(y_ptr.dtype.element_ty), mask=n_8 < num_outputs)
        tl.store(y_ptr + n_8 + 8, two_8.to(y_ptr.dtype.element_ty), mask=n_8 + 8 < num_outputs)
    else:
        y_C8_ptr = y_ptr + choice_C[:, None] * num_outputs + n_8[None, :]
        tl.store(y_C8_ptr, one_C8.to(y_ptr.dtype.element_ty), mask=(n_8 < num_outputs)[None, :])
        tl.store(y_C8_ptr + 8, two_C8.to(y_ptr.dtype.element_ty), mask=(n_8 + 8 < num_outputs)[None, :])


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
    """Return (C, N), a row times each chosen expert's matrix plus its bias, or (N,), their sum by shares, in bfloat16.

    Sums are in float32. An expert that does not exist (E or more) adds nothing to the sum.

    Args:
        x_CK: one row (1, K), or with shares one for each choice, in bfloat16; and all others are contiguous.
        weight_ENJ, exponent_EXN: see mxfp4_kernel.py.
        choice_C: with shares what the last call without shares took.
        early: start before the previous kernel ends; only if the hardware can.
    """
    given = x_CK, weight_ENJ, exponent_EXN, bias_EN, choice_C, share_C
    assert all(each is None or each.is_contiguous() for each in given)
    assert x_CK.dtype == torch.bfloat16, x_CK.dtype
    experts, outputs, half = weight_ENJ.shape
    choices, summed = choice_C.numel(), share_C is not None
    y = x_CK.new_empty(outputs if summed else (choices, outputs))
    at_once = triton.next_power_of_2(choices) if summed else 1
    _row[(triton.cdiv(outputs, 16), 1 if summed else choices)](
        x_CK.view(torch.int32),
        weight_ENJ.view(torch.int32),
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
        at_once,
        _STEPS,
        summed,
        _ASSEMBLY,
        early,
        num_warps=min(_MOST_WARPS, at_once * _STEPS) if summed else _WARPS,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if early else {}),
    )
    return y
