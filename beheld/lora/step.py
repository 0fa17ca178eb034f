"""The mapping from a step's tokens to LoRA adapters, and the computation that adds their outputs.

Shapes: T tokens of the step, I inputs and O outputs of a layer, P parts of a fused layer (q, k, v; otherwise one), S
slots, R the largest rank. Slots are numbered from 1; 0 means no adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from beheld.core.errors import StepError


@dataclass(eq=False)
class LayerWeights:
    """One layer's part of all slots.

    Attributes:
        down_SPRI: matrices into the low rank; rows beyond an adapter's rank are zero.
        up_OSR: matrices out of the low rank, already scaled; columns beyond the rank are zero. Each part has its rows
            of O.
        ranks_SP: int64 on the CPU: the rank in use, 0 where a slot's adapter does not change this part.
        sizes: outputs of each part; their sum is O.
    """

    down_SPRI: Tensor
    up_OSR: Tensor
    ranks_SP: Tensor
    sizes: Sequence[int]


class LoRAStep(Protocol):
    """What the layers read from the forward context."""

    def add(self, y_TO: Tensor, x_TI: Tensor, weights: LayerWeights) -> None:
        """Add the adapters' outputs for `x_TI` to `y_TO`, in place."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Steps whose layout the host knows: each adapter multiplies only its tokens, at its rank.

    Attributes:
        num_tokens: T.
        runs: pairs (slot, its tokens: a range, or int64 indices on the device).
    """

    num_tokens: int
    runs: tuple[tuple[int, slice | Tensor], ...]

    def add(self, y_TO: Tensor, x_TI: Tensor, weights: LayerWeights) -> None:
        """See LoRAStep.

        Raises:
            StepError: the number of rows is not the step's number of tokens.
        """
        if x_TI.shape[0] != self.num_tokens:
            raise StepError(f"A layer with a LoRA adapter got {x_TI.shape[0]} rows for {self.num_tokens} tokens.")
        ranks = weights.ranks_SP.tolist()
        for slot, place in self.runs:
            own = x_TI[place]
            low = 0
            for part, (size, rank) in enumerate(zip(weights.sizes, ranks[slot - 1], strict=True)):
                if rank:
                    hidden_TR = own @ weights.down_SPRI[slot - 1, part, :rank].t()
                    y_TO[place, low : low + size] += hidden_TR @ weights.up_OSR[low : low + size, slot - 1, :rank].t()
                low += size


@dataclass(frozen=True, eq=False)
class Slots:
    """Steps whose layout only the device knows (CUDA graphs): a token multiplies with all slots and masks the others.

    `slots_T` is int64. The product with all slots costs little compared to the layer while the sum of the ranks is
    small, and it needs no sorting and no shape that depends on values.
    """

    slots_T: Tensor

    def add(self, y_TO: Tensor, x_TI: Tensor, weights: LayerWeights) -> None:
        """See LoRAStep."""
        slots, parts, most, inputs = weights.down_SPRI.shape
        hidden = (x_TI @ weights.down_SPRI.view(-1, inputs).t()).view(-1, slots, parts, most)
        own_TS = self.slots_T[:, None] == torch.arange(1, slots + 1, device=x_TI.device)
        hidden = torch.where(own_TS[:, :, None, None], hidden, 0)
        low = 0
        for part, size in enumerate(weights.sizes):
            up = weights.up_OSR[low : low + size].reshape(size, slots * most)
            y_TO[:, low : low + size] += hidden[:, :, part].reshape(-1, slots * most) @ up.t()
            low += size


def runs_of(slots_T: np.ndarray, device: torch.device) -> Runs | None:
    """Return the runs of a step whose tokens have these slots; None if no token has an adapter."""
    found: list[tuple[int, slice | Tensor]] = []
    for slot in np.unique(slots_T):
        if slot == 0:
            continue
        index = np.flatnonzero(slots_T == slot)
        first, last = int(index[0]), int(index[-1])
        whole = last - first + 1 == len(index)
        place = slice(first, last + 1) if whole else torch.from_numpy(index).to(device, non_blocking=True)
        found.append((int(slot), place))
    return Runs(len(slots_T), tuple(found)) if found else None
