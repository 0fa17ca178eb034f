"""Triton kernels around the products of many rows' experts: what order the rows take, and the sum for each token.

A slot is a token and one of its experts. A library's product takes slots in the order of experts. `slots` finds that
order by counting, in one launch where sorting takes several; `summed` reads what each token's slots gave, wherever it
stands, so that nothing is put back into order before.

Shapes: T tokens, C choices per token, S = T C slots, E experts, H hidden size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Slots that a program looks at together, and numbers of a row.
_SLOTS = 2048
_NUMBERS = 1024


@triton.jit
def _slots(choice_ptr, order_ptr, place_ptr, start_ptr, num_slots, experts, BLOCK: tl.constexpr):
    """One program finds the slots of an expert; one more those without an expert, which come last."""
    expert = tl.program_id(0)
    b_B = tl.arange(0, BLOCK)
    before_B = tl.zeros([BLOCK], tl.int32)
    own_B = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_slots, BLOCK):
        choice_B = tl.load(choice_ptr + first + b_B, mask=first + b_B < num_slots, other=-1)
        choice_B = tl.minimum(choice_B, experts)
        before_B += ((choice_B >= 0) & (choice_B < expert)).to(tl.int32)
        own_B += (choice_B == expert).to(tl.int32)
    place = tl.sum(before_B, 0)
    tl.store(start_ptr + expert, place)
    # Most experts of a small batch have no slot.
    num_looked = tl.where(tl.sum(own_B, 0) > 0, num_slots, 0)
    for first in range(0, num_looked, BLOCK):
        slot_B = first + b_B
        choice_B = tl.load(choice_ptr + slot_B, mask=slot_B < num_slots, other=-1)
        own_B = (tl.minimum(choice_B, experts) == expert).to(tl.int32)
        place_B = place + tl.cumsum(own_B, 0) - own_B
        tl.store(order_ptr + place_B, slot_B.to(tl.int64), mask=own_B > 0)
        tl.store(place_ptr + slot_B, place_B, mask=own_B > 0)
        place += tl.sum(own_B, 0)


@triton.jit
def _summed(y_ptr, place_ptr, choice_ptr, share_ptr, out_ptr, width, experts, C: tl.constexpr, BLOCK: tl.constexpr):
    """One program adds up numbers of a token's slots."""
    token = tl.program_id(0).to(tl.int64)
    h_H = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total_H = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(C):
        slot = token * C + choice
        place = slot
        if place_ptr is not None:
            place = tl.load(place_ptr + slot).to(tl.int64)
        has_expert = tl.load(choice_ptr + slot) < experts
        share = tl.load(share_ptr + slot).to(tl.float32)
        # What a product leaves for a slot without an expert may be anything.
        y_H = tl.load(y_ptr + place * width + h_H, mask=(h_H < width) & has_expert, other=0.0)
        total_H += share * y_H.to(tl.float32)
    tl.store(out_ptr + token * width + h_H, total_H.to(out_ptr.dtype.element_ty), mask=h_H < width)


def slots(choices_TC: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return slots in the order of experts (S,), where each expert starts there plus the end of the last (E + 1,), and
    the place of each slot (S,). The slots of an expert keep their order; those without one come last.

    Args:
        choices_TC: contiguous integers from 0; those from `experts` on mean none.
    """
    assert choices_TC.is_contiguous()
    num_slots = choices_TC.numel()
    order_S = choices_TC.new_empty(num_slots, dtype=torch.int64)
    place_S = choices_TC.new_empty(num_slots, dtype=torch.int32)
    start_E1 = choices_TC.new_empty(experts + 1, dtype=torch.int32)
    block = min(_SLOTS, max(32, triton.next_power_of_2(num_slots)))
    _slots[(experts + 1,)](
        choices_TC, order_S, place_S, start_E1, num_slots, experts, block, num_warps=8, enable_fp_fusion=True
    )
    return order_S, start_E1, place_S


def summed(y_SH: Tensor, place_S: Tensor | None, choices_TC: Tensor, shares_TC: Tensor, experts: int) -> Tensor:
    """Return (T, H): the sum over a token's choices of share * y, in float32; one from `experts` on adds nothing.

    Args:
        y_SH: and all others are contiguous.
        place_S: the row of y_SH that a slot has; None: its own number.
    """
    assert all(each is None or each.is_contiguous() for each in (y_SH, place_S, choices_TC, shares_TC))
    (tokens, choices), width = choices_TC.shape, y_SH.shape[1]
    out_TH = y_SH.new_empty((tokens, width))
    block = min(_NUMBERS, triton.next_power_of_2(width))
    grid = (tokens, triton.cdiv(width, block))
    given = y_SH, place_S, choices_TC, shares_TC, out_TH, width, experts
    _summed[grid](*given, choices, block, num_warps=4, enable_fp_fusion=True)
    return out_TH
