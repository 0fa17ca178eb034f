"""A ban on repeating any n tokens of a row in the same order, as transformers' `no_repeat_ngram_size` has it.

Shapes: B rows of a batch, R of them with such a ban, N positions of the longest, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.core.params import Sampling
from beheld.sample.history import History


@dataclass(frozen=True, eq=False)
class Repeating:
    """The rows of a batch that must not repeat themselves; `sizes` are their n."""

    places: tuple[int, ...]
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    places_R: Tensor
    slots_R: Tensor
    sizes_R1: Tensor


class RepeatTable:
    """The tokens of the rows that must not repeat themselves, prompt included."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._history = History(device)
        self._sizes: dict[int, int] = {}

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int | None:
        """A row's slot; None if it may repeat itself."""
        if not params.no_repeat_ngram:
            return None
        slot = self._history.admit(token_ids, max(num_prompt + params.max_tokens, len(token_ids)) + 1)
        self._sizes[slot] = params.no_repeat_ngram
        return slot

    def release(self, slot: int) -> None:
        """The slot is free."""
        del self._sizes[slot]
        self._history.release(slot)

    def gather(self, places: Sequence[int], slots: Sequence[int]) -> Repeating:
        """Index tensors for the rows of one batch composition."""
        sizes = [self._sizes[slot] for slot in slots]
        table_3R = torch.tensor([list(places), list(slots), sizes])
        places_R, slots_R, sizes_R = table_3R.to(self._history.ids_SH.device, non_blocking=True)
        return Repeating(tuple(places), tuple(slots), tuple(sizes), places_R, slots_R, sizes_R.unsqueeze(1))

    def apply_(self, logits_BV: Tensor, rows: Repeating, lengths: Sequence[int]) -> None:
        """Ban in place every token that would make the last n tokens up to position `lengths` stand there twice.

        ids     a  b  c  a  b  ?        n = 3: after "a b" came c, so c is banned

        Args:
            logits_BV: contiguous.
            lengths: of each row of `rows`.
        """
        ids_RN = self._history.ids_SH[rows.slots_R, : max(lengths)]
        lengths_R1 = torch.tensor(lengths).to(ids_RN.device, non_blocking=True).unsqueeze(1)
        position_N = torch.arange(ids_RN.shape[1], device=ids_RN.device)
        # Whether the n - 1 tokens before a position are the last n - 1 of all, one after the other from the back.
        match_RN = (position_N >= rows.sizes_R1 - 1) & (position_N < lengths_R1)
        for back in range(1, max(rows.sizes)):
            last_R1 = ids_RN.gather(1, (lengths_R1 - back).clamp(min=0))
            same_RN = (ids_RN[:, :-back] == last_R1) | (rows.sizes_R1 <= back)
            match_RN[:, back:] &= same_RN
        # Ids behind those that the head knows cannot be chosen anyway.
        match_RN &= ids_RN < self._vocab_size
        # Added, not assigned: a token may follow several beginnings, and only some of them match.
        ban_RN = torch.zeros_like(match_RN, dtype=torch.float32).masked_fill_(match_RN, -math.inf)
        index_RN = rows.places_R.unsqueeze(1) * self._vocab_size + ids_RN.clamp(max=self._vocab_size - 1)
        logits_BV.view(-1).index_add_(0, index_RN.view(-1), ban_RN.view(-1))

    def append(self, rows: Repeating, lengths: Sequence[int], ids_B: Tensor) -> None:
        """Remember the tokens of the batch sampled at positions `lengths` of these rows."""
        self._history.append(rows.slots, rows.slots_R, lengths, ids_B[rows.places_R])
