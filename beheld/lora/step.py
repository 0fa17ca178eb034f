"""Which tokens of a step have which LoRA adapter, and how their layers' outputs change.

Shapes: T tokens of the step, I inputs and O outputs of a layer, P parts of a fused layer (q, k, v; one otherwise),
S slots, R the greatest rank. A slot's number counts from 1; 0 is no adapter.
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
    """One layer's share of all slots.

    Attributes:
        down_SPRI: into the low rank; rows beyond an adapter's own rank are zero.
        up_OSR: out of it, the scale included; columns likewise. A part has its own rows of O.
        ranks_SP: int64 on the CPU: the rank in use, 0 where a slot's adapter leaves this part alone.
        sizes: outputs of each part; their sum is O.
    """

    down_SPRI: Tensor
    up_OSR: Tensor
    ranks_SP: Tensor
    sizes: Sequence[int]


class LoRAStep(Protocol):
    """What the layers find in the forward context."""

    def add(self, y_TO: Tensor, x_TI: Tensor, weights: LayerWeights) -> None:
        """Add to `y_TO`, in place, what the adapters make of `x_TI`."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Steps whose layout the host knows: each adapter multiplies its own tokens, with its own rank.

    Attributes:
        num_tokens: T.
        runs: pairs (slot, its tokens: a range, or int64 indices on the device).
    """

    num_tokens: int
    runs: tuple[tuple[int, slice | Tensor], ...]

    def add(self, y_TO: Tensor, x_TI: Tensor, weights: LayerWeights) -> None:
        """See LoRAStep.

        Raises:
            StepError: the layer was given other rows than the step's tokens.
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
    """Steps whose layout only the device knows (CUDA graphs): every token meets every slot, and keeps its own.

    `slots_T` is int64. A product with all slots at once costs little beside the layer itself while the slots' ranks
    are small in sum, and it needs neither sorting nor a shape that depends on values.
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
    """The runs of a step whose tokens have these slots; None if no token has an adapter."""
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
