"""Towers of ranks that share a model: every rank runs them for all items, or each for its share of the items.

Where each takes its share of the items, it has the whole towers, and an item whose tower fails on one rank counts as
failed on all; else it may have a part of their layers. All ranks keep the same embeddings.

Shapes: E embeddings of an item, H their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from beheld.core.errors import EngineDeadError, StepError, first_line
from beheld.core.plan import EncodeItem
from beheld.parallel.group import RankGroup

# Within this time all ranks notice an error that they have in common, also where another program holds up one of them.
# It is shorter than what the watchdog waits for a rank that is stuck.
_ALIKE_S = 4.0

Encode = Callable[[Sequence[EncodeItem]], list[Tensor]]


class RankTowers:
    """Encodes items on all ranks.

    Args:
        mode: "weights", every rank encodes all items; "data", each its share, and sends the embeddings to the others.
        cut: whether a rank has only a part of the towers, so that all wait for each other within them.
    """

    def __init__(self, group: RankGroup, mode: str, cut: bool, device: torch.device, dtype: torch.dtype) -> None:
        self._group, self._shares, self._cut = group, mode == "data", cut
        self._device, self._dtype = device, dtype
        # Calls that failed on all ranks; with the collectives so far they name a failure.
        self._failures = 0

    def _check_alike(self, error: Exception) -> None:
        """Return if a call has failed on all ranks at the same place, or because the group was ended.

        Else some wait for this one within a tower.

        Raises:
            EngineDeadError: it has not.
        """
        if self._group.broken:
            # The watchdog has ended the group, and knows of which rank's error.
            return
        self._failures += 1
        where = f"tower {self._failures} {self._group.entered} {type(error).__name__}"
        if not self._group.alike(where, _ALIKE_S):
            reason = f"A tower failed on rank {self._group.rank} alone ({first_line(error)})."
            raise EngineDeadError(reason, "Restart the engine.") from error

    def encode(self, items: Sequence[EncodeItem], encode: Encode) -> list[Tensor]:
        """Return each item's embeddings (E, H), the same on all ranks; all ranks call this for the same items.

        Raises:
            StepError: a tower failed on another rank; this one's own error is raised as it is.
            EngineDeadError: a tower that ranks share out failed on this one alone.
        """
        owners = _owners(items, self._group.size) if self._shares else [self._group.rank] * len(items)
        own = [item for item, owner in zip(items, owners, strict=True) if owner == self._group.rank]
        found: list[Tensor] = []
        failure: Exception | None = None
        try:
            found = encode(own) if own else []
            for item, embeds_EH in zip(own, found, strict=True):
                if embeds_EH.shape[0] != item.num_embeds:
                    raise StepError(
                        f"The {item.modality} gave {embeds_EH.shape[0]} embeddings for {item.num_embeds} places."
                    )
        except Exception as error:
            if self._cut:
                self._check_alike(error)
                raise
            failure = error
        if self._cut:
            return found
        width = found[0].shape[1] if found else 0
        intact, narrow = self._group.least([int(failure is None), -width])
        if failure is not None:
            raise failure
        if not intact:
            raise StepError("Its tower failed on another rank.", "The log of that rank says why.")
        return self._gathered(items, owners, found, -narrow) if self._shares else found

    def _gathered(
        self, items: Sequence[EncodeItem], owners: Sequence[int], found: Sequence[Tensor], width: int
    ) -> list[Tensor]:
        """Return all ranks' embeddings in the order of the items."""
        mine = iter(found)
        out: list[Tensor] = []
        for item, owner in zip(items, owners, strict=True):
            if owner == self._group.rank:
                embeds_EH = next(mine).to(self._dtype).contiguous()
            else:
                embeds_EH = torch.empty(item.num_embeds, width, dtype=self._dtype, device=self._device)
            self._group.copy_from(embeds_EH, owner)
            out.append(embeds_EH)
        return out


def _owners(items: Sequence[EncodeItem], ranks: int) -> list[int]:
    """Return which rank encodes which item: the largest first, each by the rank that has least so far."""
    loads, owners = [0] * ranks, [0] * len(items)
    for place in sorted(range(len(items)), key=lambda place: -items[place].num_embeds):
        owner = loads.index(min(loads))
        loads[owner] += max(1, items[place].num_embeds)
        owners[place] = owner
    return owners
