"""The most likely token of each row in two Triton launches: many programs per row, then one.

torch's maximum and the small operations after it took 19 microseconds for one row of 151,936 logits on an H200.

Shapes: B rows, V vocabulary, P parts of a row, N logits of a part.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits per program.
_PART = 4096


@triton.jit
def _best_of_part(logits_ptr, values_ptr, ids_ptr, vocab_size, logits_row, N: tl.constexpr):
    """One program: the best of a part. A NaN counts as infinity, which is equally broken."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    cell_N = part * N + tl.arange(0, N)
    logit_N = tl.load(logits_ptr + row * logits_row + cell_N, mask=cell_N < vocab_size, other=float("-inf"))
    logit_N = logit_N.to(tl.float32)
    logit_N = tl.where(logit_N != logit_N, float("inf"), logit_N)
    best, place = tl.max(logit_N, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values_ptr + row * parts + part, best)
    tl.store(ids_ptr + row * parts + part, part * N + place)


@triton.jit
def _best_of_parts(values_ptr, part_ids_ptr, ids_ptr, broken_ptr, parts, P: tl.constexpr):
    """One program: a row. Of equal parts the first has the least token id."""
    row = tl.program_id(0).to(tl.int64)
    part_P = tl.arange(0, P)
    best_P = tl.load(values_ptr + row * parts + part_P, mask=part_P < parts, other=float("-inf"))
    best, part = tl.max(best_P, 0, return_indices=True, return_indices_tie_break_left=True)
    broken = (best == float("inf")) | (best == float("-inf"))
    token = tl.load(part_ids_ptr + row * parts + part)
    tl.store(ids_ptr + row, tl.where(broken, 0, token).to(tl.int64))
    tl.store(broken_ptr + row, broken)


def greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The best token (B, int64) of each row, the first of equals; and which rows (B) have no finite best and get 0."""
    assert logits_BV.stride(1) == 1
    rows, vocab_size = logits_BV.shape
    parts = triton.cdiv(vocab_size, _PART)
    values_BP = torch.empty((rows, parts), dtype=torch.float32, device=logits_BV.device)
    part_ids_BP = torch.empty((rows, parts), dtype=torch.int32, device=logits_BV.device)
    ids_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    broken_B = torch.empty(rows, dtype=torch.bool, device=logits_BV.device)
    # Rows go first: a launch allows at most 65,535 programs in its second dimension.
    _best_of_part[(rows, parts)](
        logits_BV, values_BP, part_ids_BP, vocab_size, logits_BV.stride(0), _PART, num_warps=8, enable_fp_fusion=True
    )
    _best_of_parts[(rows,)](
        values_BP,
        part_ids_BP,
        ids_B,
        broken_B,
        parts,
        max(16, triton.next_power_of_2(parts)),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return ids_B, broken_B
