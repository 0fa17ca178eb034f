"""The kernel of penalties in Triton's interpreter, on a CPU; test_penalties.py runs this in a process of its own."""

from __future__ import annotations

import random

import torch

from beheld.core.params import Sampling
from beheld.sample.penalties import PenaltyTable
from beheld.sample.penalties_kernel import penalise_

V = 5003
STRENGTHS = [(1.3, 0.0, 0.0), (0.7, 0.5, 0.0), (1.0, 0.0, 0.25), (1.1, -0.5, 0.75), (2.0, 1.0, -0.3)]


def test_to_the_bit_what_a_row_alone_gets() -> None:
    chance = random.Random(3)
    table = PenaltyTable(V, torch.device("cpu"))
    params = [
        Sampling(repetition_penalty=r, presence_penalty=p, frequency_penalty=f) for r, p, f in reversed(STRENGTHS)
    ]
    slots = [table.admit(each, chance.choices(range(V + 50), k=900), 500) for each in params]
    places = [6, 0, 3, 7, 1]
    rows = table.gather(places, slots, params)
    logits_BV = torch.randn(8, V, generator=torch.Generator().manual_seed(1)) * 5
    logits_BV[3, ::7] = float("-inf")
    logits_BV[0, 11] = float("inf")
    want_BV = logits_BV.clone()
    for index, place in enumerate(places):
        table.apply_row_(want_BV[place], rows, index)
    assert not torch.equal(want_BV, logits_BV)
    penalise_(
        logits_BV,
        table._counts_SV,
        rows.places_P,
        rows.slots_P,
        rows.repetition_P1,
        rows.presence_P1,
        rows.frequency_P1,
    )
    assert torch.equal(logits_BV, want_BV)
