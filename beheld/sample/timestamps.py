"""Rules for answers divided by timestamps, like transformers' `WhisperTimeStampLogitsProcessor`.

An answer is a row of segments: a timestamp, text, a timestamp. Timestamps never decrease.

    <|0.00|> text <|2.40|> <|2.40|> text <|5.00|> end

Shapes: B rows of a batch, R of them with the rule, V vocabulary, S slots, H columns of the history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.core.sampling import Sampling, TimestampRule
from beheld.sample.history import History


@dataclass(frozen=True, eq=False)
class TimestampRows:
    """The rows of a batch with the rule: per row the ids of TimestampRule, and where its answer begins."""

    places: tuple[int, ...]
    slots: tuple[int, ...]
    places_R: Tensor
    slots_R: Tensor
    first_R: Tensor
    end_R: Tensor
    latest_R: Tensor
    begin_R: Tensor


class TimestampTable:
    """The tokens of rows whose answers have timestamps."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._history = History(device)
        self._rules: dict[int, tuple[TimestampRule, int]] = {}

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int | None:
        """Add a row; returns its slot, or None if the rule does not bind it."""
        if params.timestamps is None:
            return None
        slot = self._history.admit(token_ids, max(num_prompt + params.max_tokens, len(token_ids)))
        self._rules[slot] = params.timestamps, num_prompt
        return slot

    def release(self, slot: int) -> None:
        """Free the slot."""
        del self._rules[slot]
        self._history.release(slot)

    def gather(self, places: Sequence[int], slots: Sequence[int]) -> TimestampRows:
        """Index tensors for the rows of one batch composition."""
        found = [self._rules[slot] for slot in slots]
        most = self._vocab_size
        latest = [most if rule.latest is None else rule.first + rule.latest for rule, _ in found]
        numbers = [
            list(places),
            list(slots),
            [rule.first for rule, _ in found],
            [rule.end for rule, _ in found],
            latest,
            [begin for _, begin in found],
        ]
        columns = torch.tensor(numbers).to(self._history.ids_SH.device, non_blocking=True)
        return TimestampRows(tuple(places), tuple(slots), *columns)

    def apply_(self, logits_BV: Tensor, rows: TimestampRows, lengths: Sequence[int]) -> None:
        """Forbid in place the tokens that cannot stand at positions `lengths`.

        An answer begins with a timestamp, at most the latest. A timestamp that ends a text is followed by the same
        timestamp or by the answer's end; one that begins a text is not followed by another. If all timestamps together
        are likelier than every other token, a timestamp follows.

        Args:
            logits_BV: float32.
            lengths: one per row of `rows`.
        """
        ids_RH = self._history.ids_SH[rows.slots_R]
        device = ids_RH.device
        length_R = torch.tensor(list(lengths)).to(device, non_blocking=True)
        width, first_R1 = ids_RH.shape[1], rows.first_R.unsqueeze(1)
        place_H = torch.arange(width, device=device)
        # The history is as long as prompt and answer, so a token's column is its position.
        own_RH = (place_H >= rows.begin_R.unsqueeze(1)) & (place_H < length_R.unsqueeze(1))
        stamp_RH = own_RH & (ids_RH >= first_R1)
        count_R = length_R - rows.begin_R
        last_R1 = (length_R - 1).clamp(min=0).unsqueeze(1)
        after_stamp_R = (count_R >= 1) & stamp_RH.gather(1, last_R1)[:, 0]
        before_R = (count_R < 2) | stamp_RH.gather(1, (last_R1 - 1).clamp(min=0))[:, 0]
        begins_R, ends_R = after_stamp_R & before_R, after_stamp_R & ~before_R
        # The last timestamp, which is the greatest; the next may be equal only after one that ends a text.
        newest_R = torch.where(stamp_RH, ids_RH, first_R1 - 1).amax(1)
        least_R = torch.where(ends_R, newest_R, newest_R + 1)
        id_V = torch.arange(self._vocab_size, device=device)
        is_stamp_RV = id_V >= first_R1
        start_R1 = (count_R == 0).unsqueeze(1)
        banned_RV = id_V == first_R1 - 1
        banned_RV |= is_stamp_RV & (begins_R.unsqueeze(1) | (id_V < least_R.unsqueeze(1)))
        banned_RV |= ends_R.unsqueeze(1) & (id_V < rows.end_R.unsqueeze(1))
        banned_RV |= start_R1 & (~is_stamp_RV | (id_V > rows.latest_R.unsqueeze(1)))
        logits_RV = logits_BV[rows.places_R].masked_fill_(banned_RV, -math.inf)
        stamps_R = logits_RV.masked_fill(~is_stamp_RV, -math.inf).logsumexp(-1)
        others_R = logits_RV.masked_fill(is_stamp_RV, -math.inf).amax(-1)
        logits_RV.masked_fill_((stamps_R > others_R).unsqueeze(1) & ~is_stamp_RV, -math.inf)
        logits_BV[rows.places_R] = logits_RV

    def append(self, rows: TimestampRows, lengths: Sequence[int], ids_B: Tensor) -> None:
        """Record the tokens that the batch sampled at positions `lengths` of these rows."""
        self._history.append(rows.slots, rows.slots_R, lengths, ids_B[rows.places_R])
