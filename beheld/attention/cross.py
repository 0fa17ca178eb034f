"""Attention to what stands beside the text: states of pictures, or of an encoder.

Tokens that look at the same states form a run, whichever sequences they belong to; within a run every token sees every
state, so no mask is needed.

Shapes: T tokens of the step, P tokens of a run, H query heads, K key-value heads, C head size, E states, L layers of
the cross group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sight:
    """Which positions of a sequence look at an item.

    Attributes:
        start, stop: the positions; to the end of the answer if `stop` is None.
        count: how many of its first states they see.
    """

    start: int
    stop: int | None
    count: int

    def covers(self, position: int) -> bool:
        """True if the token at `position` looks at the item."""
        return self.start <= position and (self.stop is None or position < self.stop)


@dataclass(eq=False)
class CrossRun:
    """Tokens of a step that look at the same states.

    Attributes:
        tokens: which: a slice of the step's tokens, or int64 indices.
        states: keys and values of each item seen, (E, L, 2, K, C).
    """

    tokens: slice | Tensor
    states: tuple[Tensor, ...]


@dataclass(eq=False)
class CrossMetadata:
    """What the tokens of one step look at.

    Attributes:
        runs: every token that looks at anything is in one of them.
        sighted_T: float32, 1.0 for tokens to which some item is shown; 0.0 for those of sequences without any, and for
            those that attend to all items because they are shown none.
    """

    runs: tuple[CrossRun, ...]
    sighted_T: Tensor


class CrossBackend(Protocol):
    """A way to compute attention to states."""

    name: str

    def attend(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Tensor:
        """Attention of every token to its run's states in layer `index` of the group; zero where there is none."""


class SDPACross:
    """One call of PyTorch's scaled_dot_product_attention for each run, over the states where they lie."""

    name = "sdpa"

    def attend(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Tensor:
        """See CrossBackend; returns (T, H, C)."""
        out_THC = torch.zeros_like(q_THC)
        for run in metadata.runs:
            k_EKC, v_EKC = (_joined(run.states, index, part) for part in (0, 1))
            out_THC[run.tokens] = _attend(q_THC[run.tokens], k_EKC, v_EKC, scale)
        return out_THC


def _joined(states: Sequence[Tensor], index: int, part: int) -> Tensor:
    parts = [item[:, index, part] for item in states]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(q_PHC: Tensor, k_EKC: Tensor, v_EKC: Tensor, scale: float) -> Tensor:
    """Every query sees every key: the query heads of one key-value head are simply more queries of it."""
    P, H, C = q_PHC.shape
    K = k_EKC.shape[1]
    q_KNC = q_PHC.unflatten(1, (K, H // K)).permute(1, 2, 0, 3).reshape(K, -1, C)
    out_KNC = F.scaled_dot_product_attention(
        q_KNC[None], k_EKC.transpose(0, 1)[None], v_EKC.transpose(0, 1)[None], scale=scale
    )[0]
    return out_KNC.reshape(K, H // K, P, C).permute(2, 0, 1, 3).reshape(P, H, C)
