"""Ends the reasoning of answers after a number of tokens: the mark that closes it is forced.

    <think> 1 2 3 ... budget </think> answer        forced only where the row has not closed it before

Which step forces is known on the host; whether the row reasons, and has closed its reasoning, only on the device.

Shapes: V vocabulary, S slots, H columns of the history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.core.params import Sampling, ThinkingBudget
from beheld.sample.history import History


@dataclass(frozen=True, eq=False)
class ThinkingRows:
    """The rows of a batch with a budget."""

    places: tuple[int, ...]
    slots: tuple[int, ...]
    places_R: Tensor
    slots_R: Tensor


class ThinkingTable:
    """The tokens of rows whose reasoning has a budget."""

    def __init__(self, device: torch.device) -> None:
        self._history = History(device)
        self._rules: dict[int, tuple[ThinkingBudget, int]] = {}

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int | None:
        """Add a row; returns its slot, or None if it has no budget."""
        rule = params.thinking
        if rule is None:
            return None
        slot = self._history.admit(token_ids, len(rule.open_ids) + rule.num_tokens + len(rule.close_ids))
        self._rules[slot] = rule, num_prompt
        return slot

    def release(self, slot: int) -> None:
        """Free the slot."""
        del self._rules[slot]
        self._history.release(slot)

    def gather(self, places: Sequence[int], slots: Sequence[int]) -> ThinkingRows:
        """Index tensors for the rows of one batch composition."""
        columns = torch.tensor([list(places), list(slots)]).to(self._history.ids_SH.device, non_blocking=True)
        return ThinkingRows(tuple(places), tuple(slots), *columns)

    def apply_(self, logits_BV: Tensor, rows: ThinkingRows, lengths: Sequence[int]) -> None:
        """Leave in place only the closing mark's token where the budget is used up at positions `lengths`."""
        for place, slot, length in zip(rows.places, rows.slots, lengths, strict=True):
            rule, begin = self._rules[slot]
            forced = closing(rule, length - begin)
            if forced is None:
                continue
            unclosed = self._unclosed(slot, rule, begin)
            logits_V = logits_BV[place]
            own = torch.where(unclosed, 0.0, logits_V[forced])
            logits_V.masked_fill_(unclosed, -math.inf)
            logits_V[forced] = own

    def _unclosed(self, slot: int, rule: ThinkingBudget, begin: int) -> Tensor:
        """Whether the row began to reason and has not closed it within the budget, on the device."""
        ids_H = self._history.ids_SH[slot]
        device, width = ids_H.device, ids_H.shape[0]
        opening, mark = len(rule.open_ids), len(rule.close_ids)
        own = ids_H[torch.arange(begin, begin + opening + rule.num_tokens, device=device) % width]
        marks = torch.tensor([*rule.open_ids, *rule.close_ids], device=device)
        begun = (own[:opening] == marks[:opening]).all()
        if rule.num_tokens < mark:
            return begun
        windows = own[opening:].unfold(0, mark, 1)
        return begun & ~(windows == marks[opening:]).all(-1).any()

    def append(self, rows: ThinkingRows, lengths: Sequence[int], ids_B: Tensor) -> None:
        """Record the tokens that the batch sampled at positions `lengths` of these rows."""
        self._history.append(rows.slots, rows.slots_R, lengths, ids_B[rows.places_R])


def closing(rule: ThinkingBudget, num_own: int) -> int | None:
    """The token that ends the reasoning of an answer that has `num_own` tokens, if it is due and not yet written."""
    number = num_own - len(rule.open_ids) - rule.num_tokens
    return rule.close_ids[number] if 0 <= number < len(rule.close_ids) else None
