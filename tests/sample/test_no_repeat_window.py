"""A ban on repetition within a window chooses as DeepSeek-OCR's logits processor does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from beheld.compat.ngram import repeating
from beheld.core.repetition import NoRepeatWindow
from beheld.core.sampling import Sampling
from beheld.sample.sampler import Sampler

V = 5
DEVICE = torch.device("cpu")


def expected(logits_NV: torch.Tensor, ban: NoRepeatWindow | None) -> list[int]:
    """The greedy answer, its bans by the definition."""
    out: list[int] = []
    for logits_V in logits_NV:
        barred = [] if ban is None else sorted(repeating(out, ban.size, ban.window) - ban.spared)
        scores_V = logits_V.clone()
        if len(barred) < V:
            scores_V[barred] = float("-inf")
        out.append(int(scores_V.argmax()))
    return out


def greedy(bans: list[NoRepeatWindow | None], prompts: list[list[int]], logits_NBV: torch.Tensor) -> list[list[int]]:
    """The same by the sampler, all rows in one batch; every step is launched twice, as after an error."""
    steps, rows = len(logits_NBV), list(range(len(bans)))
    sampler = Sampler(len(bans), V, DEVICE)
    for row, ban in enumerate(bans):
        sampler.admit(row, Sampling(max_tokens=steps, no_repeat_window=ban), prompts[row], len(prompts[row]))
    out: list[list[int]] = [[] for _ in rows]
    for step, logits_BV in enumerate(logits_NBV):
        for _ in range(2):
            ids_B = sampler.sample(logits_BV, rows, [len(prompt) + step for prompt in prompts]).ids_B
            sampler.append(rows, ids_B)
        for row in rows:
            out[row].append(int(ids_B[row]))
    return out


@pytest.mark.parametrize("seed", range(6))
def test_bans_are_those_of_the_processor(seed: int) -> None:
    torch.manual_seed(seed)
    dice = random.Random(seed)
    spared = frozenset((1, 128821))
    bans = [NoRepeatWindow(3, 9), NoRepeatWindow(2, 5, spared), None, NoRepeatWindow(3, 9), NoRepeatWindow(1, 3)]
    # Prompts that repeat what answers would: only the answer counts.
    prompts = [[dice.randrange(V) for _ in range(dice.randrange(1, 200))] for _ in bans]
    # Few tokens and fixed favourites, so that nearly every step would repeat something; more steps than a window has.
    logits_NBV = 0.4 * torch.randn(160, len(bans), V) + 2 * torch.randn(len(bans), V)
    found = greedy(bans, prompts, logits_NBV)
    assert found == [expected(logits_NBV[:, row], ban) for row, ban in enumerate(bans)]
    free = greedy([None] * len(bans), prompts, logits_NBV)
    assert [row for row, ban in enumerate(bans) if found[row] != free[row]] == [0, 1, 3, 4]


def test_a_row_that_resumes_remembers_what_it_said() -> None:
    torch.manual_seed(1)
    logits_NBV = 0.3 * torch.randn(40, 1, V) + 2 * torch.randn(1, V)
    ban = NoRepeatWindow(2, 12)
    (whole,) = greedy([ban], [[2, 4]], logits_NBV)
    sampler = Sampler(1, V, DEVICE)
    sampler.admit(0, Sampling(max_tokens=40, no_repeat_window=ban), [2, 4, *whole[:25]], 2)
    rest = []
    for step in range(25, 40):
        ids_B = sampler.sample(logits_NBV[step], [0], [2 + step]).ids_B
        sampler.append([0], ids_B)
        rest.append(int(ids_B))
    assert rest == whole[25:]


def test_a_row_takes_the_slot_of_another() -> None:
    """A slot that is given back and a batch that shrinks leave no ban behind."""
    torch.manual_seed(2)
    logits_NBV = 0.3 * torch.randn(20, 2, V) + 2 * torch.randn(2, V)
    sampler = Sampler(2, V, DEVICE)
    ban = NoRepeatWindow(2, 12)
    for turn in range(3):
        bans = [None if turn == 1 else ban, ban]
        for row in range(2):
            sampler.admit(row, Sampling(max_tokens=20, no_repeat_window=bans[row]), [turn], 1)
        out: list[list[int]] = [[], []]
        for step in range(20):
            ids_B = sampler.sample(logits_NBV[step], [0, 1], [1 + step, 1 + step]).ids_B
            sampler.append([0, 1], ids_B)
            for row in range(2):
                out[row].append(int(ids_B[row]))
        assert out == [expected(logits_NBV[:, row], bans[row]) for row in range(2)], turn
        for row in range(2):
            sampler.release(row)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}])
def test_a_ban_yields_where_nothing_else_is_allowed(options: dict[str, Any]) -> None:
    """The family advises the ban, and the request says which tokens it allows: such a request failed."""
    sampler = Sampler(3, V, DEVICE)
    ban = NoRepeatWindow(2, 12)
    for row, allowed in enumerate(((3,), (2, 3), None)):
        params = Sampling(max_tokens=40, no_repeat_window=ban, allowed_token_ids=allowed, **options)
        sampler.admit(row, params, [1], 1)
    torch.manual_seed(4)
    logits_NBV = 0.3 * torch.randn(40, 3, V) + 2 * torch.randn(3, V)
    out: list[list[int]] = [[], [], []]
    for step, logits_BV in enumerate(logits_NBV):
        sampled = sampler.sample(logits_BV, [0, 1, 2], [1 + step] * 3)
        sampler.append([0, 1, 2], sampled.ids_B)
        assert not sampled.nan_B.any()
        for row, token in enumerate(sampled.ids_B.tolist()):
            out[row].append(token)
    assert set(out[0]) == {3}
    assert set(out[1]) == {2, 3}
    for row, allowed in ((1, {2, 3}), (2, set(range(V)))):
        for place, token in enumerate(out[row]):
            barred = repeating(out[row][:place], 2, 12)
            assert token not in barred or allowed <= barred
