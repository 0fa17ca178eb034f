"""Filters keep what the definitions say, on both paths: row by row, and all rows at once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beheld.core.sampling import Sampling
from beheld.sample.filters import Masks, filters, floor_of_row, floors
from tests.sample.reference import probabilities

CPU = torch.device("cpu")


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    return Sampling(
        temperature=1.0,
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 50, 1500, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
    )


@settings(max_examples=120, deadline=None)
@given(
    params=st.lists(samplings(), min_size=1, max_size=4),
    size=st.sampled_from([1, 5, 33, 2000, 5000]),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_both_paths_keep_what_the_definition_keeps(
    params: list[Sampling], size: int, spread: float, ties: bool, seed: int
) -> None:
    logits_RV = torch.randn(len(params), size, generator=torch.Generator().manual_seed(seed)) * spread
    if ties:
        logits_RV = logits_RV.round()
    chosen = filters(params, size, CPU)
    together_R1 = torch.full((len(params), 1), -math.inf) if chosen is None else floors(logits_RV, chosen)
    for row, row_params in enumerate(params):
        alone = np.float32(floor_of_row(logits_RV[row].numpy(), row_params))
        wanted_V = probabilities(logits_RV[row], row_params) > 0
        for floor in (alone, together_R1[row].item()):
            kept_V = logits_RV[row] >= floor
            # The sum that ends a nucleus may round to either side of top_p: one logit and its equals may differ.
            unlike = logits_RV[row][kept_V != wanted_V].unique()
            assert len(unlike) <= (row_params.top_p < 1.0), (floor, row_params)
            if len(unlike):
                without_nucleus = replace(row_params, top_p=1.0)
                chances_V = probabilities(logits_RV[row], without_nucleus)
                equals_N = chances_V[logits_RV[row] == unlike]
                # Of equal logits the sum may end the nucleus behind any.
                ends_N = chances_V[logits_RV[row] > unlike].sum() + torch.cat(
                    [equals_N.new_zeros(1), equals_N.cumsum(0)]
                )
                assert (ends_N - row_params.top_p).abs().min().item() <= 1e-6


@pytest.mark.parametrize("mate", [1, 2, 3, 7, 40])
def test_equals_of_the_last_of_top_k_count_whatever_the_other_rows_ask_for(mate: int) -> None:
    """Logits of 16 bits are often equal: here 2.0 is the third, and twelve more are kept with it."""
    logits_V = torch.tensor([4.0, 3.0, *[2.0] * 13, *[1.0] * 30])
    for top_p in (0.3, 0.4, 0.5, 0.9):
        mine = Sampling(temperature=1.0, top_k=3, top_p=top_p)
        chosen = filters([mine, Sampling(temperature=1.0, top_k=mate)], len(logits_V), CPU)
        assert chosen is not None
        floor = floors(torch.stack([logits_V, logits_V]), chosen)[0].item()
        assert torch.equal(logits_V >= floor, probabilities(logits_V, mine) > 0), top_p
        assert floor == floor_of_row(logits_V.numpy(), mine)


def test_nothing_to_filter_is_nothing_to_do() -> None:
    assert filters([Sampling(temperature=1.0), Sampling(temperature=0.5, top_k=100)], 100, CPU) is None
    assert floor_of_row(np.zeros(100, np.float32), Sampling(temperature=1.0)) == -math.inf


def test_the_best_is_always_kept() -> None:
    logits = torch.tensor([[0.0, 5.0, -math.inf, 5.0]])
    for params in (Sampling(top_p=1e-9), Sampling(min_p=1.0), Sampling(top_k=1)):
        chosen = filters([params], 4, CPU)
        assert chosen is not None
        for floor in (floors(logits, chosen).item(), floor_of_row(logits[0].numpy(), params)):
            assert (logits[0] >= floor).tolist() == [False, True, False, True]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_bit_mask(size: int) -> None:
    allowed = torch.rand(3, size, generator=torch.Generator().manual_seed(0)) < 0.5
    words = torch.zeros(3, -(-size // 32) + 1, dtype=torch.int64)
    for token in range(size):
        words[:, token // 32] |= allowed[:, token].long() << (token % 32)
    logits = torch.randn(5, size)
    got, places = logits.clone(), torch.tensor([4, 0, 2])
    Masks(places, words.to(torch.int32).view(torch.uint8)).apply_(got)
    assert torch.equal(got[places], logits[places].masked_fill(~allowed, -math.inf))
    assert torch.equal(got[[1, 3]], logits[[1, 3]])
