"""Slots of experts in the order of experts: a slot is a token and one of its experts.

Shapes: T tokens, C choices per token, S = T C slots, E experts.
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
    choices_S = choices_TC.flatten().long()
    if platform_of(choices_TC.device).has_triton and choices_S.shape[0] <= UNSORTED:
        # A copy in any case: an operator's result must not be its argument.
        return choices_S.clone(), choices_S.new_empty(experts + 1, dtype=torch.int32)
    sorted_S, order_S = choices_S.sort(stable=True)
    bounds_E1 = torch.arange(experts + 1, device=choices_S.device)
    return order_S, torch.searchsorted(sorted_S, bounds_E1, out_int32=True)


def _divided_shape(choices_TC: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Describe the result for torch.compile."""
    order_S = choices_TC.new_empty(choices_TC.numel(), dtype=torch.int64)
    return order_S, choices_TC.new_empty(experts + 1, dtype=torch.int32)


operators.register("expert_slots(Tensor choices, int experts) -> (Tensor, Tensor)", divided, _divided_shape)
