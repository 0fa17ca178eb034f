"""Reasoning ends after its budget: rows that have not closed it get the closing mark, the others nothing."""

from __future__ import annotations

import pytest
import torch

from beheld.core.params import Sampling, ThinkingBudget
from tests.sample.test_no_repeat_ngram import V, greedy

STEPS = 12


def expected(params: Sampling, logits_NV: torch.Tensor) -> list[int]:
    """One row, token by token."""
    rule = params.thinking
    own: list[int] = []
    for logits_V in logits_NV:
        token = int(logits_V.argmax())
        if rule is not None:
            start = len(rule.open_ids)
            reasoned = own[start : start + rule.num_tokens]
            closed = any(
                tuple(reasoned[place : place + len(rule.close_ids)]) == rule.close_ids for place in range(len(reasoned))
            )
            number = len(own) - start - rule.num_tokens
            if tuple(own[:start]) == rule.open_ids and not closed and 0 <= number < len(rule.close_ids):
                token = rule.close_ids[number]
        own.append(token)
    return own


@pytest.mark.parametrize("seed", range(6))
def test_the_mark_is_forced_where_reasoning_is_open(seed: int) -> None:
    torch.manual_seed(seed)
    rules = [
        ThinkingBudget(3, (), (5,)),
        ThinkingBudget(0, (), (4, 5)),
        ThinkingBudget(4, (1,), (5,)),
        ThinkingBudget(6, (), (4, 5)),
        ThinkingBudget(1, (), (4, 5)),
        None,
    ]
    params = [Sampling(max_tokens=STEPS, thinking=rule, min_tokens=row % 2) for row, rule in enumerate(rules)]
    prompts = [[2], [1, 2, 5], [5, 5], [0] * 9, [3] * 40, [1]]
    logits_NBV = torch.randn(STEPS, len(rules), V)
    # The third row begins as the rule says, in half of the cases.
    logits_NBV[0, 2, 1] += 20.0 * (seed % 2)
    found = greedy(params, prompts, logits_NBV)
    assert found == [expected(one, logits_NBV[:, row]) for row, one in enumerate(params)]
    assert found != greedy([Sampling(max_tokens=STEPS)] * len(rules), prompts, logits_NBV)
