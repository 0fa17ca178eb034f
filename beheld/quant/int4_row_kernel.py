"""A Triton kernel of a single row times 4-bit weights in groups, by tensor cores.

Unpacking is what such a kernel spends its time on: two weights take a shift, a mask and a sum, and a tensor core
multiplies and adds within a warp, although all of its eight columns hold the same row. Sums are in float32, and what is
multiplied is exact.

See int4_kernel.py for blocks of 16 outputs and 128 inputs, and what their numbers hold. Each lane has pieces of two
outputs, eight apart: 4 words, whose halves have weights for two inputs side by side, in each of their four nibbles. A
product of tensor cores (`mma.m16n8k16`) takes a nibble of two words of both outputs, so that no weight leaves its lane.
That holds only if lane i has output i / 4 and piece i % 4. Triton places the elements of a flat tensor so; results are
NaN if it ever does not, which the engine's self-test refuses.

A group's part of a product is scale sum((q - 8) x) + (low + 8 scale) sum(x); the second term is left out if all weights
are scale (q - 8). Tensor cores find sum(x), too: the row times ones.

Early starts are those of models/one_row_kernel.py.

Shapes: N outputs, K inputs, G groups, C blocks of inputs, A of them at a time, S groups of a block, M = 32 A lanes: a
block, one of 8 outputs, and one of 4 pieces.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait
from beheld.quant.lanes_kernel import LANE, RowTiling, four, store_outputs

# Triton's interpreter has no assembly.
_ASSEMBLY = not triton.knobs.runtime.interpret
# A block's outputs; and words of 32 bits.
_OUTPUTS = 16
_WORDS = tl.constexpr(256)
# From so many outputs on there are programs enough.
_MANY_OUTPUTS = 16384
# Of a type: its name, 1, what a nibble in the last bits of its mantissa stands above, and what makes q - 8 of it.
_TYPES = {True: ("bf16", 0x3F803F80, 0x43004300, 0xC308C308), False: ("f16", 0x3C003C00, 0x64006400, 0xE408E408)}


def _instructions(nibble: int, brain: bool, lows: bool) -> str:
    """Return instructions that add the products of one nibble of a lane's words.

    Operands: the sums of both outputs (and of the row, with `lows`), the four words of the first output and of the
    second, four words of the row, and the sums so far.
    """
    kind, one, above, rest = _TYPES[brain]
    sums = 3 if lows else 2
    first, second, row, before = sums, sums + 4, sums + 8, sums + 12
    made = ".reg .b32 one, rest, a0, a1, a2, a3; .reg .f32 none1, none2, none3;"
    made += f"mov.b32 one, {one:#x}; mov.b32 rest, {rest:#x};"
    made += "".join(f".reg .f32 y{place}; mov.f32 y{place}, ${before + place};" for place in range(sums))
    # Rows 0 to 7 of the left operand are first outputs, rows 8 to 15 second ones; then the same of other inputs.
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    for pair in range(2):
        for place, word in enumerate((first, second, first + 1, second + 1)):
            at = f"a{place}"
            made += f"shr.b32 {at}, ${word + 2 * pair}, {4 * nibble};"
            made += f"lop3.b32 {at}, {at}, 0x000F000F, {above:#x}, 0xEA; fma.rn.{kind}x2 {at}, {at}, one, rest;"
        x = f"{{${row + 2 * pair}, ${row + 2 * pair + 1}}}"
        made += f"{product} {{y0, none1, y1, none3}}, {{a0, a1, a2, a3}}, {x}, {{y0, y0, y1, y1}};"
        if lows:
            made += f"{product} {{y2, none1, none2, none3}}, {{one, one, one, one}}, {x}, {{y2, y2, y2, y2}};"
    made += "".join(f"mov.f32 ${place}, y{place};" for place in range(sums))
    return "{" + made + "}"


# By nibble.
_BRAIN = tl.constexpr(tuple(_instructions(nibble, True, False) for nibble in range(4)))
_BRAIN_LOWS = tl.constexpr(tuple(_instructions(nibble, True, True) for nibble in range(4)))
_HALF = tl.constexpr(tuple(_instructions(nibble, False, False) for nibble in range(4)))
_HALF_LOWS = tl.constexpr(tuple(_instructions(nibble, False, True) for nibble in range(4)))
_OPERANDS = tl.constexpr(",".join(["=&f"] * 2 + ["r"] * 12 + ["f"] * 2))
_OPERANDS_LOWS = tl.constexpr(",".join(["=&f"] * 3 + ["r"] * 12 + ["f"] * 3))


@triton.jit
def _pair(x, BRAIN: tl.constexpr):
    """Return two numbers of 16 bits, side by side in one of 32, as float32. BRAIN: they are bfloat16, not float16."""
    if BRAIN:
        return (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
    else:
        first = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return first, ((x >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _times(word_M, early_M, late_M, nibble: tl.constexpr):
    """Return the products of a word's nibble with two inputs, added, without assembly."""
    early = ((word_M >> (4 * nibble)) & 15).to(tl.float32) - 8.0
    late = ((word_M >> (4 * nibble + 16)) & 15).to(tl.float32) - 8.0
    return early * early_M + late * late_M


@triton.jit
def _of_group(pointer, g_M, n_M, num_outputs, num_groups):
    return tl.load(pointer + g_M * num_outputs + n_M, mask=g_M < num_groups, other=0.0)


@triton.jit
def _of_groups(pointer, c_M, n_M, num_outputs, num_groups, S: tl.constexpr):
    """Return one number for each output in each of a block's groups; 0 beyond the last."""
    if S == 1:
        return (_of_group(pointer, c_M, n_M, num_outputs, num_groups),)
    elif S == 2:
        first = _of_group(pointer, 2 * c_M, n_M, num_outputs, num_groups)
        return first, _of_group(pointer, 2 * c_M + 1, n_M, num_outputs, num_groups)
    else:
        first = _of_group(pointer, 4 * c_M, n_M, num_outputs, num_groups)
        second = _of_group(pointer, 4 * c_M + 1, n_M, num_outputs, num_groups)
        third = _of_group(pointer, 4 * c_M + 2, n_M, num_outputs, num_groups)
        return first, second, third, _of_group(pointer, 4 * c_M + 3, n_M, num_outputs, num_groups)


@triton.jit
def _nibble(
    a0, a1, a2, a3, b0, b1, b2, b3, one_M, two_M, total_M, x_M4_ptr, here_M1, k_M, num_inputs,
    NIBBLE: tl.constexpr, WHOLE: tl.constexpr, BRAIN: tl.constexpr, LOWS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return the sums of two outputs and of the row, with what one nibble of their words adds."""
    inside_M1 = here_M1
    if not WHOLE:
        inside_M1 = inside_M1 & (k_M + 32 * NIBBLE < num_inputs)[:, None]
    x0, x1, x2, x3 = four(tl.load(x_M4_ptr + 16 * NIBBLE, mask=inside_M1, other=0))
    if not ASSEMBLY:
        e0, l0 = _pair(x0, BRAIN)
        e1, l1 = _pair(x1, BRAIN)
        e2, l2 = _pair(x2, BRAIN)
        e3, l3 = _pair(x3, BRAIN)
        one_M += _times(a0, e0, l0, NIBBLE) + _times(a1, e1, l1, NIBBLE)
        one_M += _times(a2, e2, l2, NIBBLE) + _times(a3, e3, l3, NIBBLE)
        two_M += _times(b0, e0, l0, NIBBLE) + _times(b1, e1, l1, NIBBLE)
        two_M += _times(b2, e2, l2, NIBBLE) + _times(b3, e3, l3, NIBBLE)
        total_M += e0 + l0 + e1 + l1 + e2 + l2 + e3 + l3
    elif LOWS:
        one_M, two_M, total_M = tl.inline_asm_elementwise(
            _BRAIN_LOWS[NIBBLE] if BRAIN else _HALF_LOWS[NIBBLE],
            _OPERANDS_LOWS,
            [a0, a1, a2, a3, b0, b1, b2, b3, x0, x1, x2, x3, one_M, two_M, total_M],
            dtype=(tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        one_M, two_M = tl.inline_asm_elementwise(
            _BRAIN[NIBBLE] if BRAIN else _HALF[NIBBLE],
            _OPERANDS,
            [a0, a1, a2, a3, b0, b1, b2, b3, x0, x1, x2, x3, one_M, two_M],
            dtype=(tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    return one_M, two_M, total_M


@triton.jit
def _row(
    x_ptr,
    weight_ptr,
    scale_ptr,
    low_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_outputs,
    num_inputs,
    num_groups,
    num_blocks,
    A: tl.constexpr,
    S: tl.constexpr,
    WHOLE: tl.constexpr,
    BRAIN: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes 16 outputs; the next blocks load while the current ones are multiplied.

    The row and the weights are read as words of 32 bits. WHOLE: inputs fill their blocks.
    """
    if EARLY:
        gdc_launch_dependents()
    m_M = tl.arange(0, 32 * A)
    i_4 = tl.arange(0, 4)
    c_M = m_M // 32
    first = tl.program_id(0) * 16
    n_M = first + m_M // 4 % 8
    w_M4_ptr = weight_ptr + (tl.program_id(0) * num_blocks * _WORDS + m_M // 32 * _WORDS + m_M % 32 * 4)[:, None]
    w_M4_ptr += i_4[None, :]
    there_M1 = (c_M < num_blocks)[:, None]
    next_one_M4 = tl.load(w_M4_ptr, mask=there_M1, other=0)
    next_two_M4 = tl.load(w_M4_ptr + 128, mask=there_M1, other=0)
    next_scale_one = _of_groups(scale_ptr, c_M, n_M, num_outputs, num_groups, S)
    next_scale_two = _of_groups(scale_ptr, c_M, n_M + 8, num_outputs, num_groups, S)
    if low_ptr is not None:
        next_low_one = _of_groups(low_ptr, c_M, n_M, num_outputs, num_groups, S)
        next_low_two = _of_groups(low_ptr, c_M, n_M + 8, num_outputs, num_groups, S)
    if EARLY:
        gdc_wait()
    if ASSEMBLY:
        acc_one_M = tl.inline_asm_elementwise(LANE, "=f,r", [m_M % 32], dtype=tl.float32, is_pure=True, pack=1)
    else:
        acc_one_M = tl.zeros([32 * A], tl.float32)
    acc_two_M = acc_one_M
    x_M4_ptr = x_ptr + (c_M * 64 + m_M % 4 * 4)[:, None] + i_4[None, :]
    for at in range(0, num_blocks, A):
        a0, a1, a2, a3 = four(next_one_M4)
        b0, b1, b2, b3 = four(next_two_M4)
        scale_one = next_scale_one
        scale_two = next_scale_two
        here_M1 = (at + c_M < num_blocks)[:, None]
        w_M4_ptr += A * _WORDS
        there_M1 = (at + A + c_M < num_blocks)[:, None]
        next_one_M4 = tl.load(w_M4_ptr, mask=there_M1, other=0)
        next_two_M4 = tl.load(w_M4_ptr + 128, mask=there_M1, other=0)
        next_scale_one = _of_groups(scale_ptr, at + A + c_M, n_M, num_outputs, num_groups, S)
        next_scale_two = _of_groups(scale_ptr, at + A + c_M, n_M + 8, num_outputs, num_groups, S)
        if low_ptr is not None:
            low_one = next_low_one
            low_two = next_low_two
            next_low_one = _of_groups(low_ptr, at + A + c_M, n_M, num_outputs, num_groups, S)
            next_low_two = _of_groups(low_ptr, at + A + c_M, n_M + 8, num_outputs, num_groups, S)
        for s in tl.static_range(S):
            one_M = tl.zeros([32 * A], tl.float32)
            two_M = tl.zeros([32 * A], tl.float32)
            total_M = tl.zeros([32 * A], tl.float32)
            for i in tl.static_range(4 // S):
                one_M, two_M, total_M = _nibble(
                    a0, a1, a2, a3, b0, b1, b2, b3, one_M, two_M, total_M, x_M4_ptr,
                    here_M1, (at + c_M) * 128, num_inputs,
                    s * (4 // S) + i, WHOLE, BRAIN, low_ptr is not None, ASSEMBLY,
                )  # fmt: skip
            scale_M = scale_one[s].to(tl.float32)
            more_M = scale_two[s].to(tl.float32)
            acc_one_M += one_M * scale_M
            acc_two_M += two_M * more_M
            if low_ptr is not None:
                acc_one_M += total_M * (low_one[s].to(tl.float32) + 8.0 * scale_M)
                acc_two_M += total_M * (low_two[s].to(tl.float32) + 8.0 * more_M)
        x_M4_ptr += A * 64
    # A tensor core gives each of four lanes the sum of them all.
    share = 0.25 if ASSEMBLY else 1.0
    n_8 = first + tl.arange(0, 8)
    for half in tl.static_range(2):
        y_M = acc_two_M if half else acc_one_M
        y_8 = tl.sum(tl.sum(tl.reshape(y_M, [A, 8, 4]), 2), 0) * share
        store_outputs(y_8, n_8 + 8 * half, bias_ptr, residual_ptr, y_ptr)


def row(
    x_1K: Tensor,
    weight_NX: Tensor,
    scale_GN: Tensor,
    low_GN: Tensor | None,
    bias_N: Tensor | None,
    residual_1N: Tensor | None,
    y_1N: Tensor,
    *,
    split: int,
    early: bool,
    tiling: RowTiling | None = None,
) -> None:
    """Fill `y_1N` with x W^T + bias (+ residual); see int4_kernel.product.

    Args:
        split: groups of a block.
        tiling: in place of what is chosen for the shape.
    """
    (_, inputs), (outputs, words), groups = x_1K.shape, weight_NX.shape, scale_GN.shape[0]
    blocks = words // 16
    at_a_time, warps = tiling or _tiling(outputs)
    _row[(outputs // _OUTPUTS,)](
        x_1K.view(torch.int32), weight_NX, scale_GN, low_GN, bias_N, residual_1N, y_1N, outputs, inputs, groups, blocks,
        at_a_time, split, inputs % 128 == 0, x_1K.dtype == torch.bfloat16, _ASSEMBLY, early,
        num_warps=warps, enable_fp_fusion=True, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _tiling(outputs: int) -> RowTiling:
    """Return how so many outputs are computed."""
    # Measured on an H200 at the sizes of a 7B model's layers.
    return RowTiling(4, 4) if outputs >= _MANY_OUTPUTS else RowTiling(16, 16)
