"""Slots of experts without a kernel: their order, and the sum for each token."""

from __future__ import annotations

import torch

from beheld.quant.slots import placed, summed

EXPERTS = 4


def test_slots_are_in_the_order_of_experts() -> None:
    chosen = torch.tensor([[2, 0], [5, 2], [0, 4]])
    order, starts, places = placed(chosen, EXPERTS)
    assert order.tolist() == [1, 4, 0, 3, 5, 2]
    assert starts.tolist() == [0, 2, 2, 4, 4]
    assert places[order].tolist() == list(range(6))


def test_what_no_expert_gave_is_not_read() -> None:
    chosen, shares = torch.tensor([[1, 3], [4, 0]]), torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    order, _, places = placed(chosen, EXPERTS)
    y = torch.tensor([[float(slot)] for slot in order])
    y[order == 2] = float("nan")
    assert summed(y, places, chosen, shares, EXPERTS).tolist() == [[2.0], [9.0]]
    in_slots = torch.empty_like(y)
    in_slots[order] = y
    assert summed(in_slots, None, chosen, shares, EXPERTS).tolist() == [[2.0], [9.0]]
