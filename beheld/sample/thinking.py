"""Ends the reasoning of answers after a number of tokens: the mark that closes it is forced.

    <think> 1 2 3 ... budget </think> answer        forced only where the row has not closed it before

Which steps may force is known on the host; whether the row reasons, and how long it has, only on the device. There each
position of a row has a state, which the one before it and the position's token determine:

    _BEFORE   only blanks so far
    n >= 0    the row reasons, and n tokens followed the mark that opened the reasoning
    _OVER     the reasoning is closed, or the answer began with something else

Shapes: V vocabulary, R rows of a batch with a budget, S slots, K blank tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.core.plan import MAX_DRAFT_TOKENS
from beheld.core.sampling import Sampling, ThinkingBudget
from beheld.sample.history import History

# A row remembers more states than the last one, because a step may be launched again and drafts may be wrong.
_SPARE = 8 + MAX_DRAFT_TOKENS
_BEFORE = -1
_OVER = 1 << 40
# Blank tokens that may precede the mark that opens the reasoning; while they may, each step looks whether it is due.
_MAX_BLANKS = 16
# No token.
_NONE = -1


@dataclass(frozen=True, eq=False)
class ThinkingRows:
    """The rows of a batch with a budget.

    Attributes:
        places, slots: for each row, its place in the batch and its slot.
        open_R, close_R: the tokens of its marks; `open_R` is -1 where the prompt has begun the reasoning.
        most_R: its budget.
        blanks_RK: the blank tokens, padded with -1.
    """

    places: tuple[int, ...]
    slots: tuple[int, ...]
    places_R: Tensor
    slots_R: Tensor
    open_R: Tensor
    close_R: Tensor
    most_R: Tensor
    blanks_RK: Tensor


class ThinkingTable:
    """How long the rows with a budget have reasoned."""

    def __init__(self, device: torch.device) -> None:
        self._states = History(device)
        self._rules: dict[int, ThinkingBudget] = {}

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int | None:
        """Add a row; returns its slot, or None if it has no budget."""
        rule = params.thinking
        if rule is None:
            return None
        states = [0 if rule.open_id is None else _BEFORE]
        for token in token_ids[num_prompt:]:
            states.append(_state_after(states[-1], token, rule))
        # A row remembers no state before that of its last prompt token.
        slot = self._states.admit([states[0]] * (num_prompt - 1) + states, _SPARE)
        self._rules[slot] = rule
        return slot

    def release(self, slot: int) -> None:
        """Free the slot."""
        del self._rules[slot]
        self._states.release(slot)

    def gather(self, places: Sequence[int], slots: Sequence[int]) -> ThinkingRows:
        """Index tensors for the rows of one batch composition."""
        device = self._states.ids_SH.device
        rules = [self._rules[slot] for slot in slots]
        fields = [
            list(places),
            list(slots),
            [_NONE if rule.open_id is None else rule.open_id for rule in rules],
            [rule.close_id for rule in rules],
            [rule.num_tokens for rule in rules],
        ]
        kinds = dict.fromkeys(rule.blank_ids for rule in rules)
        most = max(1, *map(len, kinds))
        blanks = torch.tensor([[*kind, *[_NONE] * (most - len(kind))] for kind in kinds])
        order = {kind: number for number, kind in enumerate(kinds)}
        chosen = torch.tensor([order[rule.blank_ids] for rule in rules])
        # Rows of one model have the same blanks: one copy goes to the device.
        blanks_GK, chosen_R = (part.to(device, non_blocking=True) for part in (blanks, chosen))
        places_R, slots_R, open_R, close_R, most_R = torch.tensor(fields).to(device, non_blocking=True).unbind()
        return ThinkingRows(
            tuple(places), tuple(slots), places_R, slots_R, open_R, close_R, most_R, blanks_GK[chosen_R]
        )

    def apply_(self, logits_BV: Tensor, rows: ThinkingRows, lengths: Sequence[int]) -> None:
        """Leave in place only the closing mark where the reasoning's budget is used up at positions `lengths`."""
        before_R = self._before(rows, lengths)
        due_R = (before_R >= rows.most_R) & (before_R < _OVER)
        logits_RV = logits_BV[rows.places_R].masked_fill_(due_R.unsqueeze(1), -math.inf)
        own_R1 = logits_RV.gather(1, rows.close_R.unsqueeze(1)).masked_fill_(due_R.unsqueeze(1), 0.0)
        logits_BV[rows.places_R] = logits_RV.scatter_(1, rows.close_R.unsqueeze(1), own_R1)

    def append(self, rows: ThinkingRows, lengths: Sequence[int], ids_B: Tensor) -> None:
        """Record the tokens that the batch sampled at positions `lengths` of these rows."""
        before_R, ids_R = self._before(rows, lengths), ids_B[rows.places_R]
        blank_R = (ids_R.unsqueeze(1) == rows.blanks_RK).any(1)
        first_R = torch.where(blank_R, _BEFORE, _OVER).masked_fill_(ids_R == rows.open_R, 0)
        later_R = torch.where(ids_R == rows.close_R, _OVER, before_R + 1).clamp_(max=_OVER)
        self._states.append(rows.slots, rows.slots_R, lengths, torch.where(before_R == _BEFORE, first_R, later_R))

    def _before(self, rows: ThinkingRows, lengths: Sequence[int]) -> Tensor:
        """The states before positions `lengths`."""
        states_SH = self._states.ids_SH
        columns_R = torch.tensor([(length - 1) % states_SH.shape[1] for length in lengths])
        return states_SH[rows.slots_R, columns_R.to(states_SH.device, non_blocking=True)]


def _state_after(before: int, token: int, rule: ThinkingBudget) -> int:
    """The state after one more token, as `append` computes it on the device."""
    if before == _BEFORE:
        return 0 if token == rule.open_id else _BEFORE if token in rule.blank_ids else _OVER
    return _OVER if token == rule.close_id else min(before + 1, _OVER)


def may_close(rule: ThinkingBudget, num_own: int) -> bool:
    """True if the budget may be used up where an answer has `num_own` tokens."""
    if rule.open_id is None:
        return num_own == rule.num_tokens
    return 0 <= num_own - 1 - rule.num_tokens <= (_MAX_BLANKS if rule.blank_ids else 0)
