"""Towers of ranks that share a model, each of which runs them for all items; each may have a part of their layers.

All ranks keep the same embeddings. Ranks that share out the items instead: parallel/shared_items.py.

Shapes: E embeddings of an item, H their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        cut: whether a rank has only a part of the towers, so that all wait for each other within them.
    """

    def __init__(self, group: RankGroup, *, cut: bool) -> None:
        self._group, self._cut = group, cut
        # Calls that failed on all ranks. This number and that of the collectives so far identify a failure.
        self._failures = 0

    def _check_alike(self, error: Exception) -> None:
        """Check that a call failed on all ranks at the same place, or because the group was ended.

        If only this rank failed, others still wait for it inside a tower.

        Raises:
            EngineDeadError: only this rank failed.
        """
        if self._group.broken:
            # The watchdog has ended the group, and knows which rank failed.
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
        found: list[Tensor] = []
        failure: Exception | None = None
        try:
            found = encode(items)
            for item, embeds_EH in zip(items, found, strict=True):
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
        (intact,) = self._group.least([int(failure is None)])
        if failure is not None:
            raise failure
        if not intact:
            raise StepError("Its tower failed on another rank.", "The log of that rank says why.")
        return found
