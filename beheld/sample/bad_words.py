"""Bad words of two tokens or more: in all rows at once, bans a word's last token where the others were just generated.

Shapes: B rows of a batch, R of them with such words, W words over all of them, P tokens of the longest word without its
last, V vocabulary, S slots, H columns of the history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beheld.core.plan import MAX_DRAFT_TOKENS
from beheld.core.sampling import Sampling
from beheld.sample.history import History

# A row remembers more tokens than its longest bad word needs, because a step may be launched again and drafts may be
# wrong.
_SPARE = 8 + MAX_DRAFT_TOKENS
# Integers per word in a batch, besides its first tokens: its row among the R, the row's slot, the shortest sequence
# whose answer can contain the first tokens, how many these are, and the index of the last token in the flat logits.
_FIELDS = 5


@dataclass(frozen=True, eq=False)
class BadWordRows:
    """The rows of a batch that have bad words of several tokens, and these words.

    Attributes:
        places, slots: for each row, its place in the batch and its slot.
        rows_W, slots_W, since_W, lasts_W: see _FIELDS; `lasts_W` are indices into the flat logits.
        begins_WP: each word's tokens before its last, right-aligned.
        back_P: offset of each of them from the next position, negative.
        before_WP: True for padding before a shorter word's first token, which is not compared.
    """

    places: tuple[int, ...]
    slots: tuple[int, ...]
    places_R: Tensor
    slots_R: Tensor
    rows_W: Tensor
    slots_W: Tensor
    since_W: Tensor
    lasts_W: Tensor
    begins_WP: Tensor
    back_P: Tensor
    before_WP: Tensor


@dataclass(frozen=True, eq=False)
class _Words:
    """One row's words: the tokens before each last one, right-aligned, their number, and the last token."""

    begins_WP: NDArray[np.int64]
    needed_W: NDArray[np.int64]
    lasts_W: NDArray[np.int64]
    num_prompt: int


class BadWordTable:
    """The bad words of all rows that have some, and these rows' recent tokens."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._history = History(device)
        self._words: dict[int, _Words] = {}

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int | None:
        """Add a row; returns its slot, or None if it has no bad word of several tokens."""
        words = [word for word in params.bad_words_ids if len(word) > 1 and max(word) < self._vocab_size]
        if not words:
            return None
        longest = max(map(len, words)) - 1
        begins_WP = np.zeros((len(words), longest), dtype=np.int64)
        for begin_P, word in zip(begins_WP, words, strict=True):
            begin_P[longest + 1 - len(word) :] = word[:-1]
        needed_W, lasts_W = np.array([(len(word) - 1, word[-1]) for word in words], dtype=np.int64).T
        slot = self._history.admit(token_ids, longest + _SPARE)
        self._words[slot] = _Words(begins_WP, needed_W, lasts_W, num_prompt)
        return slot

    def release(self, slot: int) -> None:
        """Free the slot."""
        del self._words[slot]
        self._history.release(slot)

    def gather(self, places: Sequence[int], slots: Sequence[int]) -> BadWordRows:
        """The words of a batch, in one copy to the device."""
        words = [self._words[slot] for slot in slots]
        counts, longest = [len(own.lasts_W) for own in words], max(own.begins_WP.shape[1] for own in words)
        table_WF = np.zeros((sum(counts), _FIELDS + longest), dtype=np.int64)
        first = 0
        for row, (own, place, slot) in enumerate(zip(words, places, slots, strict=True)):
            part_WF = table_WF[first : first + len(own.lasts_W)]
            part_WF[:, 0], part_WF[:, 1], part_WF[:, 3] = row, slot, own.needed_W
            part_WF[:, 2] = own.needed_W + own.num_prompt
            part_WF[:, 4] = own.lasts_W + place * self._vocab_size
            part_WF[:, _FIELDS + longest - own.begins_WP.shape[1] :] = own.begins_WP
            first += len(own.lasts_W)
        device = self._history.ids_SH.device
        moved_WF = torch.from_numpy(table_WF).to(device, non_blocking=True)
        places_R, slots_R = torch.tensor([list(places), list(slots)]).to(device, non_blocking=True)
        rows_W, slots_W, since_W, needed_W, lasts_W = moved_WF[:, :_FIELDS].unbind(1)
        back_P = torch.arange(-longest, 0, device=device)
        return BadWordRows(
            tuple(places), tuple(slots), places_R, slots_R, rows_W, slots_W, since_W, lasts_W, moved_WF[:, _FIELDS:],
            back_P, back_P < -needed_W.unsqueeze(1),
        )  # fmt: skip

    def apply_(self, logits_BV: Tensor, rows: BadWordRows, lengths: Sequence[int]) -> None:
        """Ban in place the last token of every word whose other tokens were just generated before position `lengths`.

        Args:
            logits_BV: contiguous.
            lengths: one per row of `rows`.
        """
        ids_SH = self._history.ids_SH
        lengths_R = torch.tensor(lengths).to(ids_SH.device, non_blocking=True)
        lengths_W = lengths_R[rows.rows_W]
        columns_WP = (lengths_W.unsqueeze(1) + rows.back_P) % ids_SH.shape[1]
        window_WP = ids_SH[rows.slots_W.unsqueeze(1), columns_WP]
        match_W = ((rows.begins_WP == window_WP) | rows.before_WP).all(-1) & (lengths_W >= rows.since_W)
        # Added, not assigned: two words may end with the same token, and only one of them may match.
        ban_W = torch.zeros_like(match_W, dtype=torch.float32).masked_fill_(match_W, -math.inf)
        logits_BV.view(-1).index_add_(0, rows.lasts_W, ban_W)

    def append(self, rows: BadWordRows, lengths: Sequence[int], ids_B: Tensor) -> None:
        """Record the tokens that the batch sampled at positions `lengths` of these rows."""
        self._history.append(rows.slots, rows.slots_R, lengths, ids_B[rows.places_R])
