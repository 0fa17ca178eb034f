"""The pooler alone: slices in any mixture, steps that are launched again, parameters that differ within a step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from beheld.core.errors import ParamsError
from beheld.core.plan import SeqSlice
from beheld.core.pooling import PoolerInfo
from beheld.core.pooling_params import Pooling, PoolingParams
from beheld.inputs.sampling.resolve_pooling import CommonPooling
from beheld.pool.methods import MeanMethod
from beheld.pool.pooler import PooledValues, Pooler

STATES = torch.randn(5, 40, 6, generator=torch.Generator().manual_seed(3))
IDS = [[(place * 7 + row) % 5 for place in range(40)] for row in range(5)]
PARAMS = [
    Pooling(method="last"),
    Pooling(method="mean", activate=False),
    Pooling(method="cls", dimensions=3),
    Pooling(task="token_embed", method="all", activate=False),
    Pooling(task="token_embed", method="step", step_id=2, activate=False),
]


def wanted(row: int) -> torch.Tensor:
    state = STATES[row]
    places = [place for place, token in enumerate(IDS[row]) if token == 2]
    return (
        F.normalize(state[-1], dim=0),
        state.mean(0),
        F.normalize(state[0, :3], dim=0),
        state,
        state[places],
    )[row]


@pytest.mark.parametrize("seed", range(6))
def test_slices_in_any_mixture_and_steps_that_are_launched_again(seed: int) -> None:
    chance = random.Random(seed)
    pooler = Pooler(PoolerInfo(width=6), lambda states_MH: states_MH)
    for row, params in enumerate(PARAMS):
        pooler.admit(row, params, IDS[row])
    starts, found = [0] * 5, {}
    while min(starts) < 40:
        slices, states = [], []
        for row in chance.sample(range(5), chance.randint(1, 5)):
            stop = min(40, starts[row] + chance.randint(1, 15))
            if stop == starts[row]:
                continue
            count = stop - starts[row] if PARAMS[row].reads_all else int(stop == 40)
            starts[row] = stop
            if count:
                slices.append(SeqSlice(row, stop - count, stop, (), count))
                states.append(STATES[row, stop - count : stop])
        for _ in range(chance.randint(1, 3) if slices else 0):
            # The step failed after it was pooled, and is launched again.
            made = pooler.pool(slices, torch.cat(states))
        for values in made if slices else ():
            found |= values.start_copy().to_host()
    assert sorted(found) == list(range(5))
    for row, value in found.items():
        np.testing.assert_allclose(value, wanted(row).numpy(), atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_one_step_computes_whole(seed: int) -> None:
    """They are pooled together, also with others between them that are not."""
    chance = random.Random(seed)
    pooler = Pooler(PoolerInfo(width=6), lambda states_MH: states_MH)
    params = [*PARAMS, Pooling(method="mean", second=4), Pooling(method="mean", activate=False), Pooling(method="last")]
    lengths = [chance.randint(1, 40) for _ in params]
    for row, own in enumerate(params):
        pooler.admit(row, own, IDS[row % 5][: lengths[row]])
    order = chance.sample(range(len(params)), len(params))
    counts = {row: lengths[row] if params[row].reads_all else 1 for row in order}
    states = {row: torch.randn(counts[row], 6, generator=torch.Generator().manual_seed(row)) for row in order}
    slices = [SeqSlice(row, 0, lengths[row], (), counts[row]) for row in order]
    found: dict[int, np.ndarray] = {}
    for values in pooler.pool(slices, torch.cat([states[row] for row in order])):
        found |= values.to_host()
    assert sorted(found) == list(range(len(params)))
    for row, own in enumerate(params):
        state = states[row]
        if own.method in ("last", "cls", "mean"):
            one = {"last": state[-1], "cls": state[0], "mean": state.mean(0)}[own.method][: own.dimensions]
            state = F.normalize(one, dim=0) if own.activate else one
        elif own.method == "step":
            state = state[[place for place, token in enumerate(IDS[row][: lengths[row]]) if token == 2]]
        np.testing.assert_allclose(found[row], state.numpy(), atol=1e-6)


def test_means_are_taken_without_a_check_of_lengths_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's check reads them back from a GPU, for which the host would wait."""
    given: list[bool] = []
    plain = torch.segment_reduce

    def reduced(*tensors: Any, **options: Any) -> torch.Tensor:
        given.append(options.get("unsafe", False))
        return plain(*tensors, **options)

    monkeypatch.setattr(torch, "segment_reduce", reduced)
    states = torch.randn(7, 3)
    means = MeanMethod().together(states, np.array([0, 2]), np.array([2, 7]))
    torch.testing.assert_close(means, torch.stack([states[:2].mean(0), states[2:].mean(0)]))
    assert given == [True]


def test_scores_are_calibrated_activated_and_chosen() -> None:
    info = PoolerInfo(task="classify", scores="head", width=3, logit_mean=1.0, logit_sigma=2.0)
    pooler = Pooler(info, lambda states_MH: states_MH[:, :3])
    params = [Pooling("classify", returned_ids=(2, 0)), Pooling("classify", activate=False)]
    for row, own in enumerate(params):
        pooler.admit(row, own, IDS[row])
    slices = [SeqSlice(row, 39, 40, (), 1) for row in range(2)]
    found: dict[int, np.ndarray] = {}
    for values in pooler.pool(slices, STATES[:2, -1]):
        found |= values.to_host()
    raw = (STATES[:2, -1, :3] - 1) / 2
    np.testing.assert_allclose(found[0], raw[0].softmax(-1)[[2, 0]].numpy(), atol=1e-6)
    np.testing.assert_allclose(found[1], raw[1].numpy(), atol=1e-6)


def test_a_row_that_is_admitted_again_forgets_its_parts() -> None:
    pooler = Pooler(PoolerInfo(width=6), lambda states_MH: states_MH)
    pooler.admit(0, PARAMS[1], IDS[1])
    assert not pooler.pool([SeqSlice(0, 0, 10, (), 10)], STATES[4, :10])
    pooler.release(0)
    pooler.admit(0, PARAMS[1], IDS[1])
    (values,) = pooler.pool([SeqSlice(0, 0, 40, (), 40)], STATES[1])
    np.testing.assert_allclose(values.to_host()[0], STATES[1].mean(0).numpy(), atol=1e-6)


def test_rows_with_a_number_that_is_not_finite_are_named() -> None:
    values_MD = torch.zeros(4, 2)
    assert PooledValues(values_MD, [7, 3, 5], [None, 2, None]).broken() == []
    values_MD[2, 1], values_MD[3, 0] = torch.nan, torch.inf
    assert PooledValues(values_MD, [7, 3, 5], [None, 2, None]).broken() == [3, 5]


def test_parameters_that_were_changed_are_resolved_again() -> None:
    pooling, params = CommonPooling(PoolerInfo(width=6, matryoshka=True)), PoolingParams()
    first = pooling.resolve(params)
    assert pooling.resolve(PoolingParams()) is first
    params.dimensions = 3
    assert pooling.resolve(params).dimensions == 3
    params.use_activation = 1  # type: ignore[assignment]
    with pytest.raises(ParamsError, match="use_activation"):
        pooling.resolve(params)
