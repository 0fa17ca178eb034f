"""The sampler's kernels in Triton's interpreter, on a CPU; test_kernels.py runs this in a process of its own."""

from __future__ import annotations

import random

import pytest
import torch

from beheld.core.params import Sampling
from beheld.sample import greedy_kernel, sampler
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 100, 4096, 3 * 4096 + 5])
def test_the_best_token_is_the_first_of_equals_and_no_row_breaks_another(vocab_size: int, dtype: torch.dtype) -> None:
    # In bfloat16 many are equal.
    logits_BV = torch.randn(9, vocab_size + 3, generator=torch.Generator().manual_seed(2)).to(dtype)[:, :vocab_size]
    logits_BV[1] = 0.0
    logits_BV[2] = float("-inf")
    logits_BV[3, ::2] = float("-inf")
    logits_BV[4, -1] = float("nan")
    logits_BV[5, 0] = float("inf")
    logits_BV[6, [vocab_size // 2, -1]] = 50.0
    logits_BV[7] = float("nan")
    ids_B, broken_B = greedy_kernel.greedy(logits_BV)
    want_B, want_broken_B = sampler.greedy(logits_BV)
    assert ids_B.tolist() == want_B.tolist()
    assert broken_B.tolist() == want_broken_B.tolist()
    sound = [row for row in range(9) if not broken_B[row]]
    assert {2, 4, 5, 7}.isdisjoint(sound)
    assert [ids_B[row].item() for row in sound] == [logits_BV[row].float().numpy().argmax() for row in sound]


def test_no_rows_have_no_best_token() -> None:
    ids_B, broken_B = greedy_kernel.greedy(torch.zeros(0, 5000))
    assert ids_B.shape == broken_B.shape == (0,)
    assert (ids_B.dtype, broken_B.dtype) == (torch.int64, torch.bool)
