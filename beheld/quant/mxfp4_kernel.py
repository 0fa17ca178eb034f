"""Triton kernels of MXFP4 experts: numbers of four bits, widened in registers to FP8, times rows in two FP8 terms.

FP8 (float8_e4m3fn) holds every number of four bits, and a bfloat16 is the sum of two FP8 numbers where it is not below
2^-9 of its row's largest number (below, the error is at most 2^-17 of that). So a product is that of the dequantized
weights and unrounded activations, but for the tensor cores' sums of 32 products, which keep about 13 bits.

A byte holds numbers of two groups of 32 inputs, so that a tile of bytes gives two tiles of numbers without moving any.
The exponents of four groups are one word:

    bytes of 64 inputs, byte j:    number j + 16 number (j + 32)          a number is sign, exponent (2), fraction (1)
    an FP8 of it:                  sign, 0 0, exponent, fraction, 0 0     which is 2^-6 of it

Shapes: T tokens, S slots (see slots.py), N outputs, K inputs (a multiple of 128), E experts, U = 2 S terms of
slots, J bytes of two groups, P parts of the inputs.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from beheld.quant.float8_block_kernel import Tiles, add_parts
from beheld.quant.slots import UNSORTED
from beheld.quant.slots_kernel import num_tiles, tile_slots

# Triton's interpreter has no assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret
_PROGRAMS_PER_SM = 8
_MOST_PARTS = 8


@triton.jit
def _widened(byte_NJ, ASSEMBLY: tl.constexpr):
    """Return FP8 numbers of the lower and of the upper halves, 2^-6 of theirs."""
    if ASSEMBLY:
        lower_NJ, upper_NJ = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sign, rest;
            shl.b32 sign, $2, 4;
            shl.b32 rest, $2, 2;
            and.b32 sign, sign, 0x80808080;
            and.b32 rest, rest, 0x1c1c1c1c;
            or.b32 $0, sign, rest;
            shr.b32 rest, $2, 2;
            and.b32 sign, $2, 0x80808080;
            and.b32 rest, rest, 0x1c1c1c1c;
            or.b32 $1, sign, rest;
            }
            """,
            "=r,=r,r",
            [byte_NJ],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        lower_NJ = ((byte_NJ & 8) << 4) | ((byte_NJ & 7) << 2)
        upper_NJ = (byte_NJ & 128) | ((byte_NJ & 112) >> 2)
    return lower_NJ.to(tl.float8e4nv, bitcast=True), upper_NJ.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _power(exponent_N):
    """Return the powers of two that exponents stand for."""
    return tl.where(exponent_N > 0, exponent_N << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _parted_rows(x_ptr, terms_ptr, scale_ptr, x_stride, num_inputs, num_padded, K: tl.constexpr):
    """One program parts one row: x = (high + low) * scale, a power of two; the row's maximum is below 256 of it."""
    row = tl.program_id(0).to(tl.int64)
    k_K = tl.arange(0, K)
    x_K = tl.load(x_ptr + row * x_stride + k_K, mask=k_K < num_inputs, other=0.0).to(tl.float32)
    exponent = (tl.max(tl.abs(x_K), 0).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent - 7, 1), 253)
    x_K *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    # The four leading bits by hand: back and forth through FP8 gave other numbers with Triton 3.6 on an H100.
    high_K = ((x_K.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
    high_K = tl.where(tl.abs(x_K) < 0.015625, 0.0, high_K)
    low_K = (x_K - high_K).to(tl.float8e4nv)
    high_K = high_K.to(tl.float8e4nv)
    terms_K_ptr = terms_ptr + row * 2 * num_padded + k_K
    tl.store(terms_K_ptr, high_K.to(terms_ptr.dtype.element_ty), mask=k_K < num_padded)
    tl.store(terms_K_ptr + num_padded, low_K.to(terms_ptr.dtype.element_ty), mask=k_K < num_padded)
    tl.store(scale_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["share"])
def _grouped_product(
    terms_ptr,
    x_scale_ptr,
    weight_ptr,
    exponent_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    y_ptr,
    share,
    num_slots,
    num_experts,
    num_outputs,
    num_inputs,
    steps_per_part,
    N: tl.constexpr,
    T: tl.constexpr,
    E: tl.constexpr,
    SORTED: tl.constexpr,
    BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program multiplies one tile over one part of the inputs: T slots of one expert, N outputs; y is (P, S, N).

    A row of x serves `share` successive slots.
    """
    expert, slot_T, count = tile_slots(order_ptr, starts_ptr, num_slots, num_experts, T, E, SORTED)
    if count <= 0:
        return
    # Outputs beyond the end are read as output 0, slots beyond it as slot 0, and neither is written.
    n_N = tl.program_id(1) * N + tl.arange(0, N)
    near_N = tl.where(n_N < num_outputs, n_N, 0)
    line_N = expert.to(tl.int64) * num_outputs + near_N
    j_J = tl.arange(0, 32)
    # Both terms of a slot, one after the other.
    term_T2 = (slot_T // share * 2)[:, None] + tl.arange(0, 2)[None, :]
    x_UJ_ptr = terms_ptr + tl.reshape(term_T2, [2 * T])[:, None] * num_inputs + j_J[None, :]
    w_NJ_ptr = weight_ptr + line_N[:, None] * (num_inputs // 2) + j_J[None, :]
    e_N_ptr = exponent_ptr + expert.to(tl.int64) * num_outputs * (num_inputs // 128) + near_N
    part = tl.program_id(2)
    first = part * steps_per_part
    last = tl.minimum(first + steps_per_part, num_inputs // 128)
    acc_NU = tl.zeros([N, 2 * T], tl.float32)
    # Read a step before it is needed.
    next_N = tl.load(e_N_ptr + first * num_outputs)
    for step in range(first, last):
        exponents_N = next_N
        next_N = tl.load(e_N_ptr + tl.minimum(step + 1, last - 1) * num_outputs)
        for pair in tl.static_range(2):
            lower_NJ, upper_NJ = _widened(tl.load(w_NJ_ptr + step * 64 + pair * 32), ASSEMBLY)
            for half in tl.static_range(2):
                x_UJ = tl.load(x_UJ_ptr + step * 128 + (2 * pair + half) * 32)
                part_NU = tl.dot(upper_NJ if half else lower_NJ, tl.trans(x_UJ))
                acc_NU += part_NU * _power((exponents_N >> (8 * (2 * pair + half))) & 255)[:, None]
    acc_NT = tl.sum(tl.reshape(acc_NU, [N, T, 2]), 2)
    acc_NT *= (tl.load(x_scale_ptr + slot_T // share) * 64.0)[None, :]
    if BIAS:
        bias_N = tl.load(bias_ptr + line_N).to(tl.float32)
        acc_NT += tl.where(part == 0, bias_N, 0.0)[:, None]
    y_NT_ptr = y_ptr + (part.to(tl.int64) * num_slots + slot_T)[None, :] * num_outputs + n_N[:, None]
    there_T = tl.arange(0, T) < count
    tl.store(y_NT_ptr, acc_NT.to(y_ptr.dtype.element_ty), mask=there_T[None, :] & (n_N < num_outputs)[:, None])


@triton.jit
def _dequantized(weight_ptr, exponent_ptr, out_ptr, num_outputs, num_inputs, num_kept, N: tl.constexpr):
    """One program writes N outputs of one expert, for 128 inputs."""
    expert, step = tl.program_id(2).to(tl.int64), tl.program_id(1)
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    inside_N = n_N < num_outputs
    j_J = tl.arange(0, 32)
    line_N = expert * num_outputs + n_N
    e_N_ptr = exponent_ptr + (expert * (num_inputs // 128) + step) * num_outputs + n_N
    exponents_N = tl.load(e_N_ptr, mask=inside_N, other=0)
    for pair in tl.static_range(2):
        w_NJ_ptr = weight_ptr + line_N[:, None] * (num_inputs // 2) + (step * 64 + pair * 32 + j_J)[None, :]
        byte_NJ = tl.load(w_NJ_ptr, mask=inside_N[:, None], other=0).to(tl.int32)
        for half in tl.static_range(2):
            bits_NJ = byte_NJ >> (4 * half)
            # As float32 it is 2^-126 of the number; the factor is in two parts, because one may not hold it.
            wide_NJ = (((bits_NJ & 8) << 28) | ((bits_NJ & 7) << 22)).to(tl.float32, bitcast=True)
            scale_N = _power((exponents_N >> (8 * (2 * pair + half))) & 255)
            k_J = step * 128 + (2 * pair + half) * 32 + j_J
            out_NJ_ptr = out_ptr + line_N[:, None] * num_kept + k_J[None, :]
            inside_NJ = inside_N[:, None] & (k_J < num_kept)[None, :]
            out_NJ = wide_NJ * 8.507059173023462e37 * scale_N[:, None]
            tl.store(out_NJ_ptr, out_NJ.to(out_ptr.dtype.element_ty), mask=inside_NJ)


def parted_rows(x_TK: Tensor, terms_T2K: Tensor, scale_T: Tensor) -> None:
    """Fill two FP8 terms and float32 scales: x = (first + second) * scale; x may be strided by rows.

    Args:
        terms_T2K: may have more inputs than x, which become zeros.
    """
    rows, inputs = x_TK.shape
    if rows:
        block = triton.next_power_of_2(terms_T2K.shape[2])
        warps = min(16, max(1, block // 512))
        _parted_rows[(rows,)](
            x_TK,
            terms_T2K,
            scale_T,
            x_TK.stride(0),
            inputs,
            terms_T2K.shape[2],
            block,
            num_warps=warps,
            enable_fp_fusion=True,
        )


def grouped_product(
    terms_T2K: Tensor,
    x_scale_T: Tensor,
    weight_ENJ: Tensor,
    exponent_EXN: Tensor,
    bias_EN: Tensor | None,
    order_S: Tensor,
    starts_E1: Tensor,
    y_SN: Tensor,
    share: int,
    multiprocessors: int,
    tiles: Tiles | None = None,
) -> None:
    """Fill `y_SN`: slot s is row s // share of x, times the matrix of its expert, plus its bias.

    Slots after the last expert's are undefined.

    Args:
        terms_T2K, x_scale_T: see `parted_rows`.
        weight_ENJ: bytes (E, N, K / 2), see the figure above.
        exponent_EXN: int32 (E, K / 128, N).
        order_S, starts_E1: see slots.divided.
        multiprocessors: of the GPU.
        tiles: None to choose.
    """
    experts, outputs, half = weight_ENJ.shape
    slots, steps = y_SN.shape[0], exponent_EXN.shape[1]
    if not slots:
        return
    made = _tiles(slots, experts, outputs, steps, multiprocessors) if tiles is None else tiles
    per_part = triton.cdiv(steps, made.parts)
    parts = triton.cdiv(steps, per_part)
    out = y_SN if parts == 1 else y_SN.new_empty((parts, slots, outputs), dtype=x_scale_T.dtype)
    _grouped_product[(num_tiles(slots, experts, made.rows), triton.cdiv(outputs, made.outputs), parts)](
        terms_T2K,
        x_scale_T,
        weight_ENJ,
        exponent_EXN,
        bias_EN,
        order_S,
        starts_E1,
        out,
        share,
        slots,
        experts,
        outputs,
        2 * half,
        per_part,
        made.outputs,
        made.rows,
        triton.next_power_of_2(experts),
        slots > UNSORTED,
        bias_EN is not None,
        _ASSEMBLY,
        num_warps=made.warps,
        num_stages=made.stages,
        enable_fp_fusion=True,
    )
    if parts > 1:
        add_parts(out, None, y_SN)


def dequantized(weight_ENJ: Tensor, exponent_EXN: Tensor, out_ENK: Tensor) -> None:
    """Fill `out_ENK`, which may have fewer inputs, with the numbers."""
    experts, outputs, half = weight_ENJ.shape
    grid = triton.cdiv(outputs, 64), exponent_EXN.shape[1], experts
    _dequantized[grid](
        weight_ENJ,
        exponent_EXN,
        out_ENK,
        outputs,
        2 * half,
        out_ENK.shape[2],
        64,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _tiles(slots: int, experts: int, outputs: int, steps: int, multiprocessors: int) -> Tiles:
    """Choose by the average number of slots per expert."""
    if slots <= 16 * experts:
        programs = min(slots, experts) * triton.cdiv(outputs, 64)
        parts = max(1, min(_MOST_PARTS, _PROGRAMS_PER_SM * multiprocessors // programs, steps))
        few = slots <= UNSORTED // 2 or UNSORTED < slots <= 4 * experts
        return Tiles(64, 8 if few else 16, 4, 3, parts)
    return Tiles(128, 32, 4, 3)
