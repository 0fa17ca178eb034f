"""A ban on repeating n tokens that stand among the last tokens of an answer, as model cards of page readers advise.

Shapes: B rows of a batch, R of them with one such ban, V vocabulary, H columns of the history, W tokens of the window,
K = n - 1 tokens before a banned one, P = W - n + 1 places where n tokens may begin, S spared tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.core.repetition import NoRepeatWindow
from beheld.core.sampling import Sampling
from beheld.sample.history import History

# Steps that are launched again may find the tokens of later steps.
_AHEAD = 64


@dataclass(frozen=True, eq=False)
class _Alike:
    """The rows of a batch with one ban: where they stand among all with bans, and where in the batch."""

    ban: NoRepeatWindow
    indices: tuple[int, ...]
    places_R1: Tensor
    slots_R1: Tensor
    spared_S: Tensor


@dataclass(frozen=True, eq=False)
class WindowRows:
    """The rows of a batch with a ban on repetition within a window."""

    places: tuple[int, ...]
    slots: tuple[int, ...]
    places_R: Tensor
    slots_R: Tensor
    starts: tuple[int, ...]
    alike: tuple[_Alike, ...]


class NoRepeatWindowTable:
    """The last tokens of rows with a ban on repetition within a window."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._history = History(device)
        self._bans: dict[int, tuple[NoRepeatWindow, int]] = {}

    def admit(self, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> int | None:
        """Add a row; returns its slot, or None if it has no such ban."""
        ban = params.no_repeat_window
        if ban is None:
            return None
        slot = self._history.admit(token_ids, ban.window + _AHEAD)
        self._bans[slot] = ban, num_prompt
        return slot

    def release(self, slot: int) -> None:
        """Free the slot."""
        del self._bans[slot]
        self._history.release(slot)

    def gather(self, places: Sequence[int], slots: Sequence[int]) -> WindowRows:
        """Index tensors for the rows of one batch composition."""
        device = self._history.ids_SH.device
        bans = [self._bans[slot][0] for slot in slots]
        alike = []
        for ban in dict.fromkeys(bans):
            indices = tuple(index for index, each in enumerate(bans) if each == ban)
            table_2R1 = torch.tensor([[[chosen[index]] for index in indices] for chosen in (places, slots)])
            places_R1, slots_R1 = table_2R1.to(device, non_blocking=True)
            spared_S = torch.tensor(sorted(ban.spared), dtype=torch.int64).to(device, non_blocking=True)
            alike.append(_Alike(ban, indices, places_R1, slots_R1, spared_S))
        places_R, slots_R = torch.tensor([list(places), list(slots)]).to(device, non_blocking=True)
        starts = tuple(self._bans[slot][1] for slot in slots)
        return WindowRows(tuple(places), tuple(slots), places_R, slots_R, starts, tuple(alike))

    def apply_(self, logits_BV: Tensor, rows: WindowRows, lengths: Sequence[int]) -> None:
        """Ban in place every token at position `lengths` that would repeat n tokens of the answer's last W.

        answer  a  b | c  a  b  a  b  ?        n = 3, W = 5: "a b" stands before a, so a is banned, and c is not

        A family advises the ban, and no user asked for it: it yields where all that a grammar or the request's options
        allow is banned.

        Args:
            logits_BV: contiguous; what else forbids tokens was applied.
            lengths: one per row of `rows`.
        """
        ids_SH = self._history.ids_SH
        for group in rows.alike:
            size, window = group.ban.size, group.ban.window
            stops = [lengths[index] for index in group.indices]
            starts = [rows.starts[index] for index in group.indices]
            if all(stop - start < size for stop, start in zip(stops, starts, strict=True)):
                continue
            edges_2R1 = torch.tensor([[[stop] for stop in stops], [[start] for start in starts]])
            stops_R1, starts_R1 = edges_2R1.to(ids_SH.device, non_blocking=True)
            positions_RW = stops_R1 - window + torch.arange(window, device=ids_SH.device)
            # No token is -1: what stands before the answer equals nothing.
            ids_RW = ids_SH[group.slots_R1, positions_RW % ids_SH.shape[1]].masked_fill(positions_RW < starts_R1, -1)
            followed_RP = ids_RW[:, size - 1 :]
            match_RP = followed_RP >= 0
            if size > 1:
                last_R1K = ids_RW[:, 1 - size :].unsqueeze(1)
                match_RP &= (ids_RW.unfold(1, size - 1, 1)[:, :-1] == last_R1K).all(-1)
                match_RP &= ids_RW[:, : 1 - size] >= 0
            match_RP &= ~torch.isin(followed_RP, group.spared_S) & (followed_RP < self._vocab_size)
            # Added, not assigned: a token may follow several places, and only some of them match.
            ban_RP = torch.zeros_like(match_RP, dtype=torch.float32).masked_fill_(match_RP, -math.inf)
            index_RP = group.places_R1 * self._vocab_size + followed_RP.clamp(0, self._vocab_size - 1)
            flat = logits_BV.view(-1)
            before_RP = flat[index_RP]
            flat.index_add_(0, index_RP.view(-1), ban_RP.view(-1))
            empty_R1 = (logits_BV.amax(-1) == -math.inf)[group.places_R1]
            flat[index_RP] = torch.where(empty_R1, before_RP, flat[index_RP])

    def append(self, rows: WindowRows, lengths: Sequence[int], ids_B: Tensor) -> None:
        """Record the tokens that the batch sampled at positions `lengths` of these rows."""
        self._history.append(rows.slots, rows.slots_R, lengths, ids_B[rows.places_R])
