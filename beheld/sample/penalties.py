"""Repetition, presence and frequency penalties over token counts kept on the device.

Shapes: S slots (one per row that has penalties), P such rows in a batch, V vocabulary, H remembered positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from beheld.core.plan import MAX_DRAFT_TOKENS
from beheld.core.sampling import Sampling
from beheld.platform.registry import platform_of

# The most tokens that may have to be uncounted: those of a step that is launched again, with at most one more in
# flight, and those after a wrong draft.
_REMEMBERED = 8 + MAX_DRAFT_TOKENS


@dataclass(frozen=True, eq=False)
class Penalised:
    """The rows of a batch that have penalties: places in the batch, slots, and strengths as columns."""

    places: tuple[int, ...]
    slots: tuple[int, ...]
    places_P: Tensor
    slots_P: Tensor
    repetition_P1: Tensor
    presence_P1: Tensor
    frequency_P1: Tensor


class PenaltyTable:
    """Token counts of rows with penalties. Memory is allocated for the first such row and doubled for more.

    One int32 per token holds both inputs of the penalties: bit 0 is 1 if the prompt contains the token; the higher bits
    count how often it was generated.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts_SV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._recent_SH = torch.zeros(0, _REMEMBERED, dtype=torch.int64, device=device)
        self._counted: list[int] = []
        self._free: list[int] = []

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int:
        """Count a row's tokens so far; returns its slot."""
        if not self._free:
            self._grow()
        # Popped only at the end, so that an earlier failure loses no slot.
        slot = self._free[-1]
        device = self._counts_SV.device
        ids_N = torch.tensor(token_ids, dtype=torch.int64).to(device, non_blocking=True)
        # Placeholder ids may be beyond the vocabulary.
        steps_N = torch.full((len(token_ids),), 2, dtype=torch.int32, device=device)
        steps_N[:num_prompt] = 0
        steps_N = steps_N.masked_fill(ids_N >= self._vocab_size, 0)
        counts_V = self._counts_SV[slot].zero_()
        counts_V.index_add_(0, ids_N.clamp(max=self._vocab_size - 1), steps_N)
        prompt_N = ids_N[:num_prompt]
        seen_V = torch.zeros(self._vocab_size + 1, dtype=torch.int32, device=device)
        # `seen_V[...] = 1` would copy the 1 from the host and wait for the device.
        seen_V.index_fill_(0, prompt_N.clamp(max=self._vocab_size), 1)
        counts_V += seen_V[: self._vocab_size]
        self._counted[slot] = len(token_ids)
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._free.append(slot)

    def gather(self, places: Sequence[int], slots: Sequence[int], params: Sequence[Sampling]) -> Penalised:
        """Index tensors for the rows of one batch composition."""
        device = self._counts_SV.device
        strengths_3P = torch.tensor(
            [[getattr(p, f"{name}_penalty") for p in params] for name in ("repetition", "presence", "frequency")],
            dtype=torch.float32,
        ).to(device, non_blocking=True)
        repetition_P, presence_P, frequency_P = strengths_3P.unsqueeze(-1)
        return Penalised(
            tuple(places),
            tuple(slots),
            torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True),
            torch.tensor(slots, dtype=torch.int64).to(device, non_blocking=True),
            repetition_P,
            presence_P,
            frequency_P,
        )

    def apply_(self, logits_BV: Tensor, rows: Penalised) -> None:
        """Apply the penalties of `rows` in place to the float32 logits of a whole batch.

        Defined as by OpenAI and, for repetition, by Keskar et al. (CTRL, 2019): a repeated token's logit is divided by
        the repetition penalty if positive and multiplied otherwise; presence is subtracted once, frequency per
        occurrence.
        """
        strengths = (rows.repetition_P1, rows.presence_P1, rows.frequency_P1)
        if platform_of(logits_BV.device).sampler_kernels:
            from beheld.sample.penalties_kernel import penalise_

            penalise_(logits_BV, self._counts_SV, rows.places_P, rows.slots_P, *strengths)
        else:
            logits_BV[rows.places_P] = _penalise(logits_BV[rows.places_P], self._counts_SV[rows.slots_P], *strengths)

    def apply_row_(self, logits_V: Tensor, rows: Penalised, index: int) -> None:
        """The same for row `index` of `rows` only, at its counted tokens only: on a CPU, finding them costs nothing."""
        counts_V = self._counts_SV[rows.slots[index]]
        ids_N = torch.from_numpy(np.flatnonzero(counts_V.numpy()))
        logits_V[ids_N] = _penalise(
            logits_V[ids_N],
            counts_V[ids_N],
            rows.repetition_P1[index],
            rows.presence_P1[index],
            rows.frequency_P1[index],
        )

    def append(self, rows: Penalised, lengths: Sequence[int], ids_P: Tensor) -> None:
        """Count the tokens sampled at positions `lengths`."""
        device = self._counts_SV.device
        columns_P = torch.tensor([length % _REMEMBERED for length in lengths]).to(device, non_blocking=True)
        self._recent_SH[rows.slots_P, columns_P] = ids_P
        # The last statement that can fail: tokens that were not counted are not recorded for `rewind`.
        self._counts_SV[rows.slots_P, ids_P] += 2
        for slot, length in zip(rows.slots, lengths, strict=True):
            self._counted[slot] = length + 1

    def rewind(self, slot: int, length: int) -> None:
        """Uncount the tokens at positions from `length` on: a step that is launched again samples them again."""
        counted = self._counted[slot]
        assert length <= counted <= length + _REMEMBERED, f"slot {slot} has counted {counted} tokens, not {length}"
        for position in reversed(range(length, counted)):
            column = position % _REMEMBERED
            self._counts_SV[slot].index_add_(0, self._recent_SH[slot, column : column + 1], self._minus_one())
            self._counted[slot] = position

    def _minus_one(self) -> Tensor:
        return torch.full((1,), -2, dtype=torch.int32, device=self._counts_SV.device)

    def _grow(self) -> None:
        old = len(self._counted)
        new = max(1, old)
        self._counts_SV = torch.cat([self._counts_SV, self._counts_SV.new_zeros(new, self._vocab_size)])
        self._recent_SH = torch.cat([self._recent_SH, self._recent_SH.new_zeros(new, _REMEMBERED)])
        self._counted.extend([0] * new)
        self._free.extend(reversed(range(old, old + new)))


def _penalise(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Logits after penalties; `counts` has the same shape, in the table's format."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    num_generated = counts >> 1
    return logits - frequency * num_generated - presence * (num_generated > 0)
