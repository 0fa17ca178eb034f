"""A ban on repeating n tokens of a row in the same order, like transformers' `no_repeat_ngram_size`.

Shapes: B rows of a batch, R of them with such a ban, N positions of all of these, V vocabulary, S slots, H columns of
the history, K = n - 1 tokens, for the greatest n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.core.sampling import Sampling
from beheld.sample.history import History


@dataclass(frozen=True, eq=False)
class NoRepeatRows:
    """The rows of a batch with a ban on repetition; `sizes` are their n."""

    places: tuple[int, ...]
    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    places_R: Tensor
    slots_R: Tensor
    sizes_R: Tensor


class NoRepeatTable:
    """The tokens, prompt included, of rows with a ban on repetition."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._history = History(device)
        self._sizes: dict[int, int] = {}

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int | None:
        """Add a row; returns its slot, or None if it has no such ban."""
        if not params.no_repeat_ngram:
            return None
        slot = self._history.admit(token_ids, max(num_prompt + params.max_tokens, len(token_ids)))
        self._sizes[slot] = params.no_repeat_ngram
        return slot

    def release(self, slot: int) -> None:
        """Free the slot."""
        del self._sizes[slot]
        self._history.release(slot)

    def gather(self, places: Sequence[int], slots: Sequence[int]) -> NoRepeatRows:
        """Index tensors for the rows of one batch composition."""
        sizes = [self._sizes[slot] for slot in slots]
        table_3R = torch.tensor([list(places), list(slots), sizes])
        places_R, slots_R, sizes_R = table_3R.to(self._history.ids_SH.device, non_blocking=True)
        return NoRepeatRows(tuple(places), tuple(slots), tuple(sizes), places_R, slots_R, sizes_R)

    def apply_(self, logits_BV: Tensor, rows: NoRepeatRows, lengths: Sequence[int]) -> None:
        """Ban in place every token at position `lengths` that would repeat an earlier sequence of n tokens.

        ids     a  b  c  a  b  ?        n = 3: after "a b" came c, so c is banned

        Args:
            logits_BV: contiguous.
            lengths: one per row of `rows`.
        """
        ids_SH, total = self._history.ids_SH, sum(lengths)
        numbers_2R = torch.tensor([lengths, list(itertools.accumulate(lengths, initial=0))[:-1]])
        lengths_R, firsts_R = numbers_2R.to(ids_SH.device, non_blocking=True)
        # Rows are concatenated: as a rectangle, short rows would be padded to the longest.
        row_N = torch.repeat_interleave(lengths_R, output_size=total)
        place_N = torch.arange(total, device=ids_SH.device)
        shift_R = rows.slots_R * ids_SH.shape[1] - firsts_R
        ids_N = ids_SH.view(-1).index_select(0, place_N + shift_R.index_select(0, row_N))
        # Compare the n - 1 tokens before each position with the row's last n - 1, one by one from the end.
        match_N = place_N >= (firsts_R + rows.sizes_R - 1).index_select(0, row_N)
        back_K1 = torch.arange(1, max(rows.sizes), device=ids_SH.device).unsqueeze(1)
        last_KR = ids_SH[rows.slots_R, (lengths_R - back_K1).clamp(min=0)]
        # No token is -1, so a row with a smaller n matches at the remaining offsets.
        last_KR = last_KR.masked_fill(rows.sizes_R <= back_K1, -1)
        for back, last_R in enumerate(last_KR, start=1):
            last_N = last_R.index_select(0, row_N[back:])
            match_N[back:] &= (ids_N[:-back] == last_N) | (last_N < 0)
        # Ids beyond the vocabulary cannot be sampled anyway.
        match_N &= ids_N < self._vocab_size
        # Added, not assigned: a token may follow several sequences, and only some of them match.
        ban_N = torch.zeros_like(match_N, dtype=torch.float32).masked_fill_(match_N, -math.inf)
        index_N = (rows.places_R * self._vocab_size).index_select(0, row_N) + ids_N.clamp(max=self._vocab_size - 1)
        logits_BV.view(-1).index_add_(0, index_N, ban_N)

    def append(self, rows: NoRepeatRows, lengths: Sequence[int], ids_B: Tensor) -> None:
        """Record the tokens that the batch sampled at positions `lengths` of these rows."""
        self._history.append(rows.slots, rows.slots_R, lengths, ids_B[rows.places_R])
