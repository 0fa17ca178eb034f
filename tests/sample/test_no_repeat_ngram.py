"""Bans on repetition and forced tokens choose as transformers' own logits processors do."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

from beheld.core.sampling import Sampling
from beheld.sample.sampler import Sampler

V = 6
DEVICE = torch.device("cpu")


def expected(prompt: list[int], logits_NV: torch.Tensor, steps: list[object]) -> list[int]:
    """The greedy answer under transformers' processors."""
    ids = list(prompt)
    for logits_V in logits_NV:
        scores = logits_V[None].clone()
        for step in steps:
            scores = step(torch.tensor([ids]), scores)  # type: ignore[operator]
        ids.append(int(scores.argmax()))
    return ids[len(prompt) :]


def greedy(params: list[Sampling], prompts: list[list[int]], logits_NBV: torch.Tensor) -> list[list[int]]:
    """The same by the sampler, all rows in one batch; every step is launched twice, as after an error."""
    sampler = Sampler(len(params), V, DEVICE)
    rows = list(range(len(params)))
    for row in rows:
        sampler.admit(row, params[row], prompts[row], len(prompts[row]))
    out: list[list[int]] = [[] for _ in rows]
    for step, logits_BV in enumerate(logits_NBV):
        lengths = [len(prompt) + step for prompt in prompts]
        for _ in range(2):
            ids_B = sampler.sample(logits_BV, rows, lengths).ids_B
            sampler.append(rows, ids_B)
        for row in rows:
            out[row].append(int(ids_B[row]))
    return out


@pytest.mark.parametrize("seed", range(8))
def test_bans_are_those_of_transformers(seed: int) -> None:
    torch.manual_seed(seed)
    prompts = [[2], [1, 2, 1, 2, 3], [5, 5], [0, 1, 2, 3, 4, 5, 0, 1]]
    sizes = [3, 2, 2, 4]
    # Few tokens and fixed favourites, so that nearly every step would repeat something.
    logits_NBV = 0.5 * torch.randn(14, 4, V) + 2 * torch.randn(4, V)
    params = [Sampling(max_tokens=14, no_repeat_ngram=size) for size in sizes]
    found = greedy(params, prompts, logits_NBV)
    for row, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
        assert found[row] == expected(prompt, logits_NBV[:, row], [NoRepeatNGramLogitsProcessor(size)]), size
    assert found != greedy([Sampling(max_tokens=14)] * 4, prompts, logits_NBV)


def test_a_row_that_resumes_remembers_what_it_said() -> None:
    torch.manual_seed(1)
    logits_NBV = 0.3 * torch.randn(12, 1, V) + 2 * torch.randn(1, V)
    params = Sampling(max_tokens=12, no_repeat_ngram=2)
    (whole,) = greedy([params], [[2]], logits_NBV)
    sampler = Sampler(1, V, DEVICE)
    sampler.admit(0, params, [2, *whole[:5]], 1)
    rest = []
    for step in range(5, 12):
        ids_B = sampler.sample(logits_NBV[step], [0], [1 + step]).ids_B
        sampler.append([0], ids_B)
        rest.append(int(ids_B))
    assert rest == whole[5:]


def test_no_token_twice() -> None:
    (found,) = greedy([Sampling(max_tokens=5, no_repeat_ngram=1)], [[2]], torch.arange(float(V)).expand(5, 1, V))
    assert found == [5, 4, 3, 1, 0]


def test_forced_tokens_are_those_of_transformers_whatever_else_is_asked() -> None:
    torch.manual_seed(2)
    logits_NBV = torch.randn(5, 2, V)
    steps = [ForcedBOSTokenLogitsProcessor(4), ForcedEOSTokenLogitsProcessor(6, 3)]
    forced = ((1, 4), (5, 3))
    plain = Sampling(max_tokens=5, forced_ids=forced)
    barred = Sampling(max_tokens=5, forced_ids=forced, logit_bias=((4, -100.0),), min_tokens=5, stop_ids=frozenset({3}))
    one, two = greedy([plain, barred], [[2], [2]], logits_NBV)
    assert one == expected([2], logits_NBV[:, 0], steps)
    assert one[0] == two[0] == 4
    assert one[4] == two[4] == 3
