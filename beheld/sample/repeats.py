"""A ban on repeating any n tokens of a row in the same order, as transformers' `no_repeat_ngram_size` has it.

Shapes: N positions of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class NGramBan:
    """One row's tokens, prompt included, on the device.

    Args:
        size: n, at least 1.
        vocab_size: V.
        device: where the logits are.
        token_ids: the prompt and what was generated before.
        most: positions that the row can have.
    """

    def __init__(self, size: int, vocab_size: int, device: torch.device, token_ids: Sequence[int], most: int) -> None:
        assert size >= 1
        self._size = size
        self._vocab_size = vocab_size
        known = torch.zeros(max(most, len(token_ids)) + 1, dtype=torch.int64)
        known[: len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        self._ids_N = known.to(device, non_blocking=True)

    def apply_(self, logits_V: Tensor, length: int) -> None:
        """Ban in place every token that would make the last n tokens up to position `length` stand there twice.

        ids     a  b  c  a  b  ?        n = 3: after "a b" came c, so c is banned
        """
        size = self._size
        if length < size:
            return
        begins = self._ids_N[: length - 1].unfold(0, size - 1, 1) if size > 1 else self._ids_N.new_zeros(length, 0)
        match_N = (begins == self._ids_N[length - size + 1 : length]).all(-1)
        next_N = self._ids_N[size - 1 : length]
        # Ids behind those that the head knows cannot be chosen anyway.
        match_N = match_N[: len(next_N)] & (next_N < self._vocab_size)
        # Added, not assigned: a token may follow several beginnings, and only some of them match.
        ban_N = torch.zeros_like(match_N, dtype=torch.float32).masked_fill_(match_N, -math.inf)
        logits_V.index_add_(0, next_N.clamp(max=self._vocab_size - 1), ban_N)

    def append(self, length: int, id_1: Tensor) -> None:
        """Remember the token sampled at position `length`; again is harmless."""
        self._ids_N[length : length + 1] = id_1
