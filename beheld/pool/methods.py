"""The pooling methods: which of a prompt's hidden states are kept of each slice, and what is made of them.

A prompt is computed in slices. Each gives a part; the parts of all slices are joined once the last one is there.

Shapes: N positions of a slice, H hidden size, M states that a prompt gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from beheld.core.params import Pooling


class PoolingMethod(Protocol):
    """One method."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """Return what a slice gives whose first given state is that of position `start`; None if nothing."""

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """Return the states (M, H) of a prompt of these tokens, from its slices' parts in order."""


class LastMethod:
    """The state of the last position."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """See PoolingMethod."""
        return hidden_NH[-1:]

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """See PoolingMethod."""
        return parts[-1]


class FirstMethod:
    """The state of the first position."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """See PoolingMethod."""
        return hidden_NH[:1] if start == 0 else None

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """See PoolingMethod."""
        return parts[0]


class MeanMethod:
    """The mean of all positions' states; slices are summed in float32."""

    def part(self, hidden_NH: Tensor, start: int) -> Tensor | None:
        """See PoolingMethod."""
        return hidden_NH.sum(0, keepdim=True, dtype=torch.float32)

    def joined(self, parts: Sequence[Tensor], token_ids: Sequence[int], params: Pooling) -> Tensor:
        """See PoolingMethod."""
        total_1H = parts[0] if len(parts) == 1 else torch.cat(tuple(parts)).sum(0, keepdim=True)
        return total_1H / len(token_ids)


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


METHODS: Mapping[str, PoolingMethod] = {
    "last": LastMethod(),
    "cls": FirstMethod(),
    "mean": MeanMethod(),
    "all": AllMethod(),
    "step": StepMethod(),
}
