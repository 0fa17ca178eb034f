"""The pooling methods: which of a prompt's hidden states are kept of each slice, and what is made of them.

A prompt is computed in slices. Each gives a part; the parts of all slices are joined once the last one is there.

Most prompts are computed whole in one step; methods that give one state pool all such prompts of a step together.

Shapes: N positions of a slice, S of all slices of a step, P prompts, H hidden size, M states that a prompt gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from beheld.core.pooling_params import Pooling
from beheld.platform.host_copy import sent


class PoolingMethod(Protocol):
    """One method."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """Return what a slice gives whose first given state is that of position `start`; None if nothing."""

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """Return the states (M, H) of a prompt of these tokens, from its slices' parts in order."""


class OneStateMethod(PoolingMethod, Protocol):
    """One that gives one state of each prompt."""

    def together(self, hidden_SH: Tensor, starts_P: np.ndarray, stops_P: np.ndarray) -> Tensor:
        """Return the states (P, H) of prompts that were computed whole; each lies in `hidden_SH` from start to stop."""


class LastMethod:
    """The state of the last position."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """See PoolingMethod."""
        return hidden_NH[-1:]

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """See PoolingMethod."""
        return parts[-1]

    def together(self, hidden_SH: Tensor, starts_P: np.ndarray, stops_P: np.ndarray) -> Tensor:
        """See OneStateMethod."""
        return _rows(hidden_SH, stops_P - 1)


class FirstMethod:
    """The state of the first position."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """See PoolingMethod."""
        return hidden_NH[:1] if start == 0 else None

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """See PoolingMethod."""
        return parts[0]

    def together(self, hidden_SH: Tensor, starts_P: np.ndarray, stops_P: np.ndarray) -> Tensor:
        """See OneStateMethod."""
        return _rows(hidden_SH, starts_P)


class MeanMethod:
    """The mean of all positions' states; slices are summed in float32."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """See PoolingMethod."""
        return hidden_NH.sum(0, keepdim=True, dtype=torch.float32)

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """See PoolingMethod."""
        total_1H = parts[0] if len(parts) == 1 else torch.cat(tuple(parts)).sum(0, keepdim=True)
        return total_1H / len(token_ids)

    def together(self, hidden_SH: Tensor, starts_P: np.ndarray, stops_P: np.ndarray) -> Tensor:
        """See OneStateMethod."""
        start, stop = int(starts_P[0]), int(stops_P[-1])
        if stop - start != int((stops_P - starts_P).sum()):
            # Other prompts lie between them.
            places = np.concatenate([np.arange(*bounds) for bounds in zip(starts_P, stops_P, strict=True)])
            hidden_SH, start, stop = _rows(hidden_SH, places), 0, len(places)
        counts_P = sent(stops_P - starts_P, hidden_SH.device)
        # "Unsafe": without a check of the lengths, which the host would wait for.
        return torch.segment_reduce(hidden_SH[start:stop].float(), "mean", lengths=counts_P, axis=0, unsafe=True)


class AllMethod:
    """The states of all positions."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """See PoolingMethod."""
        return hidden_NH

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """See PoolingMethod."""
        return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


class StepMethod(AllMethod):
    """The states at the positions of one token, which ends each step of an argument."""

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """See PoolingMethod."""
        places = [place for place, token in enumerate(token_ids) if token == params.step_id]
        return super().joined(parts, token_ids, params)[places]


def _rows(hidden_SH: Tensor, places: np.ndarray) -> Tensor:
    return hidden_SH.index_select(0, sent(places, hidden_SH.device))


ONE_STATE: Mapping[str, OneStateMethod] = {"last": LastMethod(), "cls": FirstMethod(), "mean": MeanMethod()}
METHODS: Mapping[str, PoolingMethod] = {**ONE_STATE, "all": AllMethod(), "step": StepMethod()}
