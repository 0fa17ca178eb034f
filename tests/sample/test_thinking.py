"""Reasoning ends after its budget: rows that have not closed it get the closing mark, the others nothing."""

from __future__ import annotations

import pytest
import torch

from beheld.core.sampling import Sampling, ThinkingBudget
from beheld.sample.sampler import Sampler
from beheld.sample.thinking import ThinkingTable
from tests.sample.test_no_repeat_ngram import DEVICE, V, greedy

STEPS = 12


def expected(params: Sampling, logits_NV: torch.Tensor) -> list[int]:
    """One row, token by token."""
    rule = params.thinking
    own: list[int] = []
    for logits_V in logits_NV:
        token = int(logits_V.argmax())
        if rule is not None:
            start = 0
            if rule.open_id is not None:
                while start < len(own) and own[start] in rule.blank_ids:
                    start += 1
                start += 1
            reasons = len(own) >= start and (start == 0 or own[start - 1] == rule.open_id)
            if reasons and len(own) - start == rule.num_tokens and rule.close_id not in own[start:]:
                token = rule.close_id
        own.append(token)
    return own


@pytest.mark.parametrize("seed", range(6))
def test_the_mark_is_forced_where_reasoning_is_open(seed: int) -> None:
    torch.manual_seed(seed)
    blank = frozenset({0, 3})
    rules = [
        ThinkingBudget(3, None, 5),
        ThinkingBudget(0, None, 5),
        ThinkingBudget(4, 1, 5),
        ThinkingBudget(2, 1, 4, blank),
        ThinkingBudget(0, 1, 5, blank),
        None,
    ]
    params = [Sampling(max_tokens=STEPS, thinking=rule, min_tokens=row % 2) for row, rule in enumerate(rules)]
    prompts = [[2], [1, 2, 5], [5, 5], [0] * 9, [3] * 40, [1]]
    logits_NBV = torch.randn(STEPS, len(rules), V)
    # Three rows begin as their rules say, in half of the cases, two of them after blanks.
    logits_NBV[0, 2, 1] += 20.0 * (seed % 2)
    for row, blanks in ((3, 1), (4, 2)):
        for step in range(blanks):
            logits_NBV[step, row, 3 * (step % 2)] += 20.0
        logits_NBV[blanks, row, 1] += 20.0 * (seed % 2)
    found = greedy(params, prompts, logits_NBV)
    assert found == [expected(one, logits_NBV[:, row]) for row, one in enumerate(params)]
    assert found != greedy([Sampling(max_tokens=STEPS)] * len(rules), prompts, logits_NBV)


def test_wrong_drafts_are_forgotten() -> None:
    """A draft may close the reasoning, or open it, and be refused: what follows replaces it."""
    sampler = Sampler(1, V, DEVICE)
    sampler.admit(0, Sampling(max_tokens=STEPS, thinking=ThinkingBudget(3, 1, 5)), [2], 1)

    def step(length: int, token: int) -> int:
        logits_V = torch.zeros(V)
        logits_V[token] = 9.0
        ids_B = sampler.sample(logits_V[None], [0], [length]).ids_B
        sampler.append([0], ids_B)
        return int(ids_B)

    assert [step(1, 3), step(2, 5)] == [3, 5]
    assert [step(1, 1), step(2, 5), step(3, 2), step(4, 2), step(5, 2)] == [1, 5, 2, 2, 2]
    assert [step(2, 0), step(3, 2), step(4, 2), step(5, 2), step(6, 2)] == [0, 2, 2, 5, 2]


def test_a_row_that_resumes_knows_how_long_it_reasoned() -> None:
    rule = ThinkingBudget(3, 1, 5, frozenset({0}))
    for said, following in (([0, 1, 2, 2, 2], 5), ([0, 1, 2, 5, 2], 4), ([0, 3, 1, 2, 2], 4)):
        sampler = Sampler(1, V, DEVICE)
        sampler.admit(0, Sampling(max_tokens=STEPS, thinking=rule), [2, 2, *said], 2)
        logits_BV = torch.zeros(1, V)
        logits_BV[0, 4] = 9.0
        assert int(sampler.sample(logits_BV, [0], [7]).ids_B) == following, said


def test_a_long_budget_takes_no_memory_for_each_token() -> None:
    """Before, a row with a budget of 131,072 tokens kept them all, and every other row as many."""
    table = ThinkingTable(DEVICE)
    for _ in range(8):
        table.admit(Sampling(max_tokens=1 << 18, thinking=ThinkingBudget(1 << 17, 1, 5)), [2] * 100, 100)
    assert table._states.ids_SH.numel() <= 8 * 64
