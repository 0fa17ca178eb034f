"""Media items that ranks share out: each encodes some of them with whole towers, and all get all embeddings.

A rank is sent the features of its own items alone.

Shapes: E embeddings of an item, H their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.media import ENCODED
from beheld.core.plan import EncodeItem
from beheld.parallel.group import RankGroup

# Bytes of a reason why a tower failed.
_REASON = 400


def shares_items(config: EngineConfig, info: ModelInfo) -> bool:
    """Return whether ranks share out the items of a step, not the layers of towers."""
    # Of states that layers attend to, each rank keeps those of its own heads.
    return config.mm_encoder_tp_mode == "data" and config.tensor_parallel_size > 1 and info.cross is None


def owners_of(items: Sequence[EncodeItem], ranks: int) -> dict[bytes, int]:
    """Return which rank encodes which item of a step, by digest; those that bring their embeddings are not named.

    The largest is given out first, each to the rank that has least so far.
    """
    loads, owners = [0] * ranks, dict[bytes, int]()
    for item in sorted(items, key=lambda item: -item.num_embeds):
        if ENCODED not in item.features:
            owner = loads.index(min(loads))
            loads[owner] += max(1, item.num_embeds)
            owners[item.digest] = owner
    return owners


class SharedItems:
    """Gives all ranks the embeddings that each has made.

    Args:
        group: of the ranks, all of which call each method for the same items.
    """

    def __init__(self, group: RankGroup, device: torch.device, dtype: torch.dtype) -> None:
        self._group, self._device, self._dtype = group, device, dtype

    def owners(self, items: Sequence[EncodeItem]) -> dict[bytes, int]:
        """See owners_of."""
        return owners_of(items, self._group.size)

    def owns(self, owner: int) -> bool:
        """Return whether this rank is the owner."""
        return owner == self._group.rank

    def exchanged(
        self, items: Sequence[EncodeItem], owners: Mapping[bytes, int], own: Mapping[bytes, Tensor | str]
    ) -> dict[bytes, Tensor | str]:
        """Return each item's embeddings (E, H), or why its tower failed on the rank that has it.

        Args:
            own: what this rank found for its items.
        """
        # Of one step, an image's embeddings may be wider than an audio's: they bring what goes into later layers.
        widths = [found.shape[1] if isinstance(found := own.get(item.digest), Tensor) else 0 for item in items]
        flags = [int(not isinstance(own.get(item.digest), str)) for item in items]
        least = self._group.least([*flags, *(-width for width in widths)])
        out: dict[bytes, Tensor | str] = {}
        for item, whole, narrow in zip(items, least[: len(items)], least[len(items) :], strict=True):
            found, owner = own.get(item.digest), owners[item.digest]
            if not whole:
                out[item.digest] = self._reasons(found if isinstance(found, str) else "")[owner]
                continue
            if isinstance(found, Tensor):
                embeds_EH = found.to(self._dtype).contiguous()
            else:
                embeds_EH = torch.empty(item.num_embeds, -narrow, dtype=self._dtype, device=self._device)
            self._group.copy_from(embeds_EH, owner)
            out[item.digest] = embeds_EH
        return out

    def elsewhere(self, reason: str) -> str:
        """Return why another rank fails; empty if none does.

        Args:
            reason: why this rank fails; empty if it does not.
        """
        (intact,) = self._group.least([int(not reason)])
        if intact:
            return ""
        given = self._reasons(reason)
        return next((each for rank, each in enumerate(given) if each and rank != self._group.rank), "")

    def _reasons(self, own: str) -> list[str]:
        """Return all ranks' reasons, cut to their first bytes."""
        given = self._group.exchanged(own.encode()[:_REASON].ljust(_REASON))
        return [each.decode(errors="ignore").rstrip() for each in given]
