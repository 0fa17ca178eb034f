"""What is reported as log-probabilities: the model's own numbers, or those of what a token was sampled from."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from beheld.core.plan import TokenLogprobs
from beheld.core.sampling import LogprobsMode, Sampling
from beheld.sample.filters import Masks
from tests.sample.reference import edited, probabilities
from tests.sample.test_sampler import PATHS, V, logits, make

PROMPT, ANSWER = (1, 2, 3), (4, 4, 5)
LENGTH = len(PROMPT) + len(ANSWER)
EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": ((7, 2.5), (9, -100.0))},
    {"allowed_token_ids": tuple(range(0, V, 3))},
    {"bad_words_ids": ((8,), (4, 5, 11)), "min_tokens": 9, "stop_ids": frozenset({12})},
]
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


def reports(
    params: list[Sampling], logits_BV: Tensor, path: str = PATHS[0], masks: Masks | None = None
) -> list[TokenLogprobs]:
    """Those of one batch."""
    sampler = make(path, rows=len(params))
    for row, each in enumerate(params):
        sampler.admit(row, each, (*PROMPT, *ANSWER), len(PROMPT))
    out = sampler.sample(logits_BV, range(len(params)), [LENGTH] * len(params), masks).to_host()
    return [out[row] for row in range(len(params))]


def columns(entry: TokenLogprobs) -> Tensor:
    """The reported number of each token, if all are reported."""
    found_V = torch.full((V,), torch.nan)
    found_V[list(entry.top_ids)] = torch.tensor(entry.top_logprobs)
    return found_V


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edits", EDITS, ids=str)
@pytest.mark.parametrize("chosen", FILTERS, ids=str)
def test_processed_numbers_are_the_probabilities_of_the_draw(
    path: str, edits: dict[str, Any], chosen: dict[str, Any]
) -> None:
    """By the slow rules: they sum to 1, and exactly what is left out has minus infinity."""
    logits_V = logits(1, 5, spread=1.5)[0]
    params = Sampling(**chosen, **edits, logprobs=V, logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS)
    wanted_V = probabilities(edited(logits_V, params, PROMPT, ANSWER), params)
    (entry,) = reports([params], logits_V[None], path)
    found_V = columns(entry)
    assert torch.equal(found_V == -torch.inf, wanted_V == 0)
    assert found_V.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(found_V.double().exp(), wanted_V, atol=1e-6)
    assert entry.logprob == found_V[entry.token_id] > -torch.inf
    assert entry.rank == 1 + int((found_V > found_V[entry.token_id]).sum())
    as_logits = dataclasses.replace(params, logprobs_mode=LogprobsMode.PROCESSED_LOGITS)
    scaled_V = edited(logits_V, params, PROMPT, ANSWER) / params.temperature
    wanted_V = scaled_V.masked_fill(wanted_V == 0, -torch.inf)
    (same,) = reports([as_logits], logits_V[None], path)
    assert torch.allclose(columns(same).double(), wanted_V, atol=1e-4)
    assert (same.token_id, same.rank) == (entry.token_id, entry.rank)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chosen", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_is_reported(path: str, chosen: dict[str, Any]) -> None:
    rows, steps = 200, 20
    logits_BV = logits(1, 5, spread=1.5).expand(rows, V).contiguous()
    base = Sampling(
        **chosen, logit_bias=((7, 1.0), (8, -2.0)), logprobs=V, logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS
    )
    sampler, counts = make(path, rows=rows), np.zeros(V)
    for row in range(rows):
        sampler.admit(row, dataclasses.replace(base, seed=row), PROMPT, len(PROMPT))
    for step in range(steps):
        out = sampler.sample(logits_BV, range(rows), [len(PROMPT) + step] * rows)
        counts += np.bincount(out.ids_B.numpy(), minlength=V)
    told_V = columns(out.to_host()[0]).double().exp().numpy()
    assert counts[told_V == 0].sum() == 0
    expected = told_V * rows * steps
    often = expected >= 5
    seen, expected = (np.append(of[often], of[~often].sum()) for of in (counts, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    degrees = len(seen) - 1
    assert (((seen - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees) < 4


def test_greedy_rows_have_the_changed_logits_without_temperature_and_filters() -> None:
    logits_BV = logits(2, 3)
    # Filters without effect, as in vLLM.
    params = Sampling(top_k=3, min_p=0.5, logit_bias=((7, 4.0),), repetition_penalty=1.2, logprobs=V)
    bytes_MW = torch.full((1, 13), 255, dtype=torch.uint8)
    bytes_MW[0, 4] = 0
    changed_BV = torch.stack([edited(each_V, params, PROMPT, ANSWER) for each_V in logits_BV])
    changed_BV[1, 32:40] = -torch.inf
    for mode, wanted_BV in (
        (LogprobsMode.PROCESSED_LOGPROBS, changed_BV.log_softmax(-1)),
        (LogprobsMode.PROCESSED_LOGITS, changed_BV),
        (LogprobsMode.RAW_LOGPROBS, logits_BV.double().log_softmax(-1)),
        (LogprobsMode.RAW_LOGITS, logits_BV.double()),
    ):
        own = dataclasses.replace(params, logprobs_mode=mode)
        found = reports([own, own], logits_BV, masks=Masks(torch.tensor([1]), bytes_MW))
        for entry, wanted_V in zip(found, wanted_BV, strict=True):
            assert torch.allclose(columns(entry).double(), wanted_V, atol=1e-4), mode


def test_a_forced_token_is_certain() -> None:
    params = Sampling(forced_ids=((LENGTH, 17),), logprobs=2, logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS)
    (entry,) = reports([params], logits(1))
    assert (entry.token_id, entry.logprob, entry.rank) == (17, 0.0, 1)
    assert entry.top_logprobs == (0.0, -torch.inf)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_of_a_batch_reports_in_its_own_mode(path: str, dtype: torch.dtype) -> None:
    """Searches read the model's own numbers in one batch with others that do not."""
    params = [
        Sampling(temperature=temperature, seed=3, top_k=9, logprobs=4, logprobs_mode=mode, **edits)
        for mode in LogprobsMode
        for temperature in (0.0, 0.7)
        for edits in EDITS[:2]
    ]
    params += [Sampling(logprobs=3, logprob_ids=(5, 6, 7), logprobs_mode=LogprobsMode.PROCESSED_LOGITS), Sampling()]
    # One that reports what its grammar allows.
    params += [Sampling(logprobs=4, num_answered=0)]
    logits_BV = logits(len(params)).to(dtype)
    bytes_MW = torch.full((1, 13), 0b1010101, dtype=torch.uint8)
    sampler = make(path, rows=len(params))
    for row, each in enumerate(params):
        sampler.admit(row, each, (*PROMPT, *ANSWER), len(PROMPT))
    rows, last = range(len(params)), len(params) - 1
    together = sampler.sample(logits_BV, rows, [LENGTH] * len(params), Masks(torch.tensor([last]), bytes_MW)).to_host()
    assert set(together) == {row for row, each in enumerate(params) if each.logprobs is not None}
    for row, told in together.items():
        masks = Masks(torch.tensor([0]), bytes_MW) if row == last else None
        (alone,) = reports([params[row]], logits_BV[row : row + 1], path, masks)
        assert (told.token_id, told.rank, told.top_ids) == (alone.token_id, alone.rank, alone.top_ids)
        assert (told.logprob, *told.top_logprobs) == pytest.approx((alone.logprob, *alone.top_logprobs), abs=1e-5)
    assert all(token % 8 in (0, 2, 4, 6) for token in together[last].top_ids)


def test_prompts_have_logits_or_log_probabilities_and_nothing_between() -> None:
    logits_TV, targets_T = logits(150), torch.arange(150) % V
    named_TN = torch.tensor([[4, -1]]).expand(150, 2)
    log_TV = logits_TV.log_softmax(-1)
    for mode in LogprobsMode:
        wanted_TV = logits_TV if mode.logits else log_TV
        found = make().prompt_logprobs(logits_TV, targets_T, 2, named_TN, mode)
        assert torch.allclose(torch.tensor(found.logprobs), wanted_TV[range(150), targets_T], atol=1e-5)
        assert torch.allclose(torch.tensor(found.top_logprobs), wanted_TV.topk(2).values, atol=1e-5)
        assert found.named_logprobs is not None
        assert torch.allclose(torch.tensor(found.named_logprobs[:, 0]), wanted_TV[:, 4], atol=1e-5)
        assert (found.named_logprobs[:, 1] == -np.inf).all()
        assert found.ranks.tolist() == [1 + int((row > row[t]).sum()) for row, t in zip(log_TV, targets_T, strict=True)]
