"""The sampler's kernels in Triton's interpreter, on a CPU; test_kernels.py runs this in a process of its own."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from triton import language as tl

from beheld.core.sampling import Sampling
from beheld.sample import filters, greedy_kernel, noise, random_kernel, sampler
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


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)


@triton.jit
def _log1p(x):  # type: ignore[no-untyped-def]
    """As W. Kahan computes it from a logarithm that is exact but for rounding."""
    w = 1.0 + x
    return tl.where(w == 1.0, x, tl.log(w) * x / tl.where(w == 1.0, 1.0, w - 1.0))


@pytest.fixture
def with_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no libdevice."""
    monkeypatch.setattr(random_kernel, "libdevice", SimpleNamespace(exp=_exp, log1p=_log1p))


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.02},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 400, "top_p": 0.9, "min_p": 0.001},
    {},
]


def _logits(kind: str, rows: int, seed: int) -> torch.Tensor:
    logits_BV = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "flat":
            return logits_BV * 0.9
        case "peaked":
            return logits_BV * 6
        case "rounded":
            return (logits_BV * 2).bfloat16()
        case "equal":
            return (logits_BV * 1.5).round()
        case "masked":
            logits_BV[:, 1:] = logits_BV[:, 1:].masked_fill(logits_BV[:, 1:] < 2.5, -1e38)
            logits_BV[:, 100:3000] = float("-inf")
            return logits_BV
    # Close to one another and far from zero: differences of a last bit.
    return 1e4 + logits_BV


@pytest.mark.usefixtures("with_math")
@pytest.mark.parametrize("kind", ["flat", "peaked", "rounded", "equal", "masked", "far"])
def test_what_is_drawn_is_what_sorting_gives(kind: str) -> None:
    params = [
        Sampling(temperature=temperature, seed=seed, **options)
        for seed, (options, temperature) in enumerate(itertools.product(FILTERS, (1.0, 0.6)))
    ]
    cpu = torch.device("cpu")
    chosen = filters.filters(params, V, cpu)
    assert chosen is not None
    seeds = np.array([noise.mix_seed(each.seed) for each in params], dtype=np.uint64)
    temperature_R1 = torch.tensor([[each.temperature] for each in params])
    places_R = torch.randperm(len(params), generator=torch.Generator().manual_seed(4)) + 1
    drawn, most = 0, 2 if kind == "rounded" else 1
    for position in range(most):
        logits_BV = _logits(kind, len(params) + 2, position)
        keys_R2 = torch.from_numpy(noise.keys(seeds, np.full(len(params), position, dtype=np.uint64)))
        scaled_RV = logits_BV[places_R].float() / temperature_R1
        weights_RV = (scaled_RV - scaled_RV.amax(-1, keepdim=True)).exp()
        weights_RV.masked_fill_(scaled_RV < filters.floors(scaled_RV, chosen), 0.0)
        want_R = (weights_RV / noise.Noise(V, cpu).exponential(keys_R2)).argmax(-1)
        ids_B = torch.full((len(params) + 2,), -7)
        broken_B = torch.ones(len(params) + 2, dtype=torch.bool)
        floor_R = random_kernel.sample_(ids_B, broken_B, logits_BV, places_R, temperature_R1, keys_R2, chosen)
        assert ids_B[places_R].tolist() == want_R.tolist()
        # What is reported of a draw: the same tokens as are drawn from, except where nothing could be drawn anyway.
        possible_RV = (scaled_RV - scaled_RV.amax(-1, keepdim=True)).exp() > 0
        assert torch.equal((scaled_RV >= floor_R[:, None]) & possible_RV, weights_RV > 0)
        assert (floor_R[-2:] == -torch.inf).all()
        assert not broken_B[places_R].any()
        assert (ids_B[[0, -1]] == -7).all()
        assert broken_B[[0, -1]].all()
        drawn += len(set(want_R.tolist()))
    assert drawn > len(params) / 2, "most are the same token"


@pytest.mark.usefixtures("with_math")
@pytest.mark.parametrize("filtered", [False, True])
def test_a_broken_row_is_told_and_hurts_no_other(filtered: bool) -> None:
    logits_BV = _logits("flat", 6, 5)
    logits_BV[1, 7] = float("nan")
    logits_BV[2] = float("-inf")
    logits_BV[3, -1] = float("inf")
    logits_BV[4, :-1] = float("-inf")
    params = [Sampling(temperature=1.0, seed=3, top_k=9, top_p=0.9)] * 6
    columns = filters.filters(params, V, torch.device("cpu"))
    assert columns is not None
    keys_R2 = torch.from_numpy(noise.keys(np.arange(6, dtype=np.uint64), np.zeros(6, dtype=np.uint64)))
    ids_B, broken_B = torch.full((6,), -7), torch.zeros(6, dtype=torch.bool)
    given = columns if filtered else None
    random_kernel.sample_(ids_B, broken_B, logits_BV, torch.arange(6), torch.ones(6, 1), keys_R2, given)
    assert broken_B.tolist() == [False, True, True, True, False, False]
    assert ids_B[[1, 2, 3]].tolist() == [0, 0, 0]
    assert ids_B[4] == V - 1
