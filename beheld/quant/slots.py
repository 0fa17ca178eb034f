"""Slots of experts in the order of experts: a slot is a token and one of its experts.

Shapes: T tokens, C choices per token, S = T C slots, E experts, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from beheld.platform import operators
from beheld.platform.registry import platform_of

# Kernels take up to this many slots unsorted; a tile holds all of them.
UNSORTED = 16


def divided(choices_TC: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return slots sorted by expert (S,), and where each expert starts there plus the end of the last (E + 1,).

    A few slots that kernels multiply are not sorted: then the first are the slots' experts, and the second is
    undefined. Slots without an expert come last.
    """
    if platform_of(choices_TC.device).has_triton and choices_TC.numel() <= UNSORTED:
        choices_S = choices_TC.flatten().long()
        # A copy in any case: an operator's result must not be its argument.
        return choices_S.clone(), choices_S.new_empty(experts + 1, dtype=torch.int32)
    return placed(choices_TC, experts)[:2]


def placed(choices_TC: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return slots sorted by expert (S,), where each expert starts there plus the end of the last (E + 1,), and where
    each slot is there (S,). Slots without an expert come last."""
    if platform_of(choices_TC.device).has_triton:
        from beheld.quant import slot_order_kernel

        return slot_order_kernel.slots(choices_TC.contiguous(), experts)
    choices_S = choices_TC.flatten().long()
    sorted_S, order_S = choices_S.sort(stable=True)
    bounds_E1 = torch.arange(experts + 1, device=choices_S.device)
    place_S = torch.empty_like(order_S).index_copy_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    return order_S, torch.searchsorted(sorted_S, bounds_E1, out_int32=True), place_S.int()


def summed(y_SH: Tensor, place_S: Tensor | None, choices_TC: Tensor, shares_TC: Tensor, experts: int) -> Tensor:
    """Return (T, H): the sum of what a token's slots give, each times its share; one without an expert adds nothing.

    Args:
        place_S: the row of y_SH that a slot has; None: its own number.
    """
    if platform_of(y_SH.device).has_triton:
        from beheld.quant import slot_order_kernel

        both = choices_TC.contiguous(), shares_TC.contiguous()
        return slot_order_kernel.summed(y_SH.contiguous(), place_S, *both, experts)
    found_SH = y_SH if place_S is None else y_SH.index_select(0, place_S)
    # What a product leaves for a slot without an expert may be anything.
    found_TCH = found_SH.view(*choices_TC.shape, -1).masked_fill((choices_TC >= experts).unsqueeze(-1), 0.0)
    return (found_TCH * shares_TC.unsqueeze(-1)).sum(1).to(y_SH.dtype)


def _divided_shape(choices_TC: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Describe the result for torch.compile."""
    order_S = choices_TC.new_empty(choices_TC.numel(), dtype=torch.int64)
    return order_S, choices_TC.new_empty(experts + 1, dtype=torch.int32)


def _placed_shape(choices_TC: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Describe the result for torch.compile."""
    return *_divided_shape(choices_TC, experts), choices_TC.new_empty(choices_TC.numel(), dtype=torch.int32)


def _summed_shape(y_SH: Tensor, place_S: Tensor | None, choices_TC: Tensor, shares_TC: Tensor, experts: int) -> Tensor:
    """Describe the result for torch.compile."""
    return y_SH.new_empty((choices_TC.shape[0], y_SH.shape[1]))


operators.register("expert_slots(Tensor choices, int experts) -> (Tensor, Tensor)", divided, _divided_shape)
operators.register("expert_places(Tensor choices, int experts) -> (Tensor, Tensor, Tensor)", placed, _placed_shape)
operators.register(
    "expert_sum(Tensor y, Tensor? places, Tensor choices, Tensor shares, int experts) -> Tensor", summed, _summed_shape
)
