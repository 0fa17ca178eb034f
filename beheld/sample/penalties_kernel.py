"""The penalties of many rows in one Triton launch; torch would read and write the vocabulary a dozen times.

Shapes: B rows of a batch, P of them with penalties, S slots of the table, V vocabulary.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Logits per program.
_ELEMENTS = 4096


@triton.jit
def _penalise(
    logits_ptr,
    counts_ptr,
    places_ptr,
    slots_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocab_size,
    logits_row,
    ELEMENTS: tl.constexpr,
):
    """One program: some logits of one row."""
    index = tl.program_id(1)
    cell_N = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside_N = cell_N < vocab_size
    counts_N = tl.load(counts_ptr + tl.load(slots_ptr + index) * vocab_size + cell_N, mask=inside_N, other=0)
    logits_ptr += tl.load(places_ptr + index) * logits_row
    # Most tokens never occurred; their logits are neither read nor written.
    counted_N = inside_N & (counts_N > 0)
    logit_N = tl.load(logits_ptr + cell_N, mask=counted_N, other=0.0)
    repetition_N = tl.load(repetition_ptr + index) + tl.zeros([ELEMENTS], tl.float32)
    logit_N = tl.where(logit_N > 0, tl.div_rn(logit_N, repetition_N), logit_N * repetition_N)
    generated_N = counts_N >> 1
    logit_N -= tl.load(frequency_ptr + index) * generated_N.to(tl.float32)
    logit_N -= tl.load(presence_ptr + index) * (generated_N > 0).to(tl.float32)
    tl.store(logits_ptr + cell_N, logit_N, mask=counted_N)


def penalise_(
    logits_BV: Tensor,
    counts_SV: Tensor,
    places_P: Tensor,
    slots_P: Tensor,
    repetition_P1: Tensor,
    presence_P1: Tensor,
    frequency_P1: Tensor,
) -> None:
    """Apply in place the penalties of slot slots_P[p] to row places_P[p] of `logits_BV`, float32.

    The result equals that of `PenaltyTable.apply_row_` in every bit: products are rounded before they are subtracted.
    """
    assert logits_BV.stride(1) == 1
    vocab_size = counts_SV.shape[1]
    _penalise[(triton.cdiv(vocab_size, _ELEMENTS), places_P.shape[0])](
        logits_BV,
        counts_SV,
        places_P,
        slots_P,
        repetition_P1,
        presence_P1,
        frequency_P1,
        vocab_size,
        logits_BV.stride(0),
        _ELEMENTS,
        num_warps=8,
        enable_fp_fusion=False,
    )
