"""Rules that depend on what a row has generated, and the recent tokens of rows, which the device keeps for them.

Shapes: S slots, R rows of a batch, H columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from beheld.core.sampling import Sampling

_COLUMNS = 16


class HistoryRule(Protocol):
    """Forbids or forces tokens by those before them, for the rows that it concerns."""

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int | None:
        """Take up a row with these tokens, if the rule concerns it; returns its slot."""

    def release(self, slot: int) -> None:
        """Free the slot."""

    def gather(self, places: Sequence[int], slots: Sequence[int]) -> Any:
        """Return what the rule needs of a batch's rows, at these places and with these slots; it has `places` too."""

    def apply_(self, logits_BV: Tensor, rows: Any, lengths: Sequence[int]) -> None:
        """Change logits in place for the tokens at positions `lengths` of these rows."""

    def append(self, rows: Any, lengths: Sequence[int], ids_B: Tensor) -> None:
        """Record the tokens that the batch sampled at positions `lengths` of these rows."""


class History:
    """The last tokens of each row that has a slot: the token at position p is in column p % H.

    Writing a token twice is harmless, so a step can be launched again. Memory is allocated for the first row, doubled
    for more rows or longer histories, and freed with the last row.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clear()

    def _clear(self) -> None:
        self.ids_SH = torch.zeros(0, _COLUMNS, dtype=torch.int64, device=self._device)
        self._lengths: list[int] = []
        self._free: list[int] = []

    def admit(self, token_ids: Sequence[int], room: int) -> int:
        """Remember at least the last `room` tokens of a row from now on; returns its slot."""
        if room > self.ids_SH.shape[1]:
            self._widen(1 << (room - 1).bit_length())
        if not self._free:
            self._lengthen()
        # Popped only at the end, so that an earlier failure loses no slot.
        slot, width = self._free[-1], self.ids_SH.shape[1]
        first = max(0, len(token_ids) - width)
        known_H = np.zeros(width, dtype=np.int64)
        known_H[np.arange(first, len(token_ids)) % width] = token_ids[first:]
        self.ids_SH[slot] = torch.from_numpy(known_H).to(self.ids_SH.device, non_blocking=True)
        self._lengths[slot] = len(token_ids)
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._lengths[slot] = 0
        self._free.append(slot)
        if len(self._free) == len(self._lengths):
            self._clear()

    def append(self, slots: Sequence[int], slots_R: Tensor, lengths: Sequence[int], ids_R: Tensor) -> None:
        """Record the tokens sampled at positions `lengths`."""
        columns = torch.tensor([length % self.ids_SH.shape[1] for length in lengths])
        self.ids_SH[slots_R, columns.to(self.ids_SH.device, non_blocking=True)] = ids_R
        for slot, length in zip(slots, lengths, strict=True):
            self._lengths[slot] = length + 1

    def _lengthen(self) -> None:
        old = len(self._lengths)
        new = max(1, old)
        self.ids_SH = torch.cat([self.ids_SH, self.ids_SH.new_zeros(new, self.ids_SH.shape[1])])
        self._lengths.extend([0] * new)
        self._free.extend(reversed(range(old, old + new)))

    def _widen(self, width: int) -> None:
        """Move every remembered token to its column among `width`."""
        old = self.ids_SH.shape[1]
        known = [np.arange(max(0, length - old), length) for length in self._lengths]
        slots_N = np.repeat(np.arange(len(known)), [len(positions) for positions in known])
        positions_N = np.concatenate([np.zeros(0, dtype=np.int64), *known])
        moves = torch.from_numpy(np.stack([slots_N, positions_N % old, positions_N % width]))
        slots, sources, targets = moves.to(self.ids_SH.device, non_blocking=True)
        wider_SH = self.ids_SH.new_zeros(len(self._lengths), width)
        wider_SH[slots, targets] = self.ids_SH[slots, sources]
        self.ids_SH = wider_SH
