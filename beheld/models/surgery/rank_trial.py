"""What ranks that share layers agree on while each tries another form of them."""

from __future__ import annotations

from beheld.core.errors import EngineDeadError, first_line
from beheld.parallel.group import RankGroup

# Within this time a trial that fails on one rank fails on all; else the others wait for that rank.
_ALIKE_S = 4.0


class RankTrial:
    """Agrees on the results of trials at load; a rank alone agrees with itself.

    Args:
        group: the ranks that share the layers, all of which try the same layers in the same order.
    """

    def __init__(self, group: RankGroup | None) -> None:
        self._group = group
        self._failures = 0

    def agreed(self, answer: bool) -> bool:
        """Return whether all ranks say yes; asked equally often on each."""
        return answer if self._group is None else bool(self._group.least([answer])[0])

    def failed(self, error: Exception) -> None:
        """Return if a trial has failed on all ranks at the same place.

        Raises:
            EngineDeadError: it has failed on this rank alone, and others may wait for it in a sum of the trial.
        """
        group = self._group
        if group is None:
            return
        self._failures += 1
        # No collective: see above.
        if not group.alike(f"trial {self._failures} {group.entered} {type(error).__name__}", _ALIKE_S):
            reason = f"A trial of the text model failed on rank {group.rank} alone ({first_line(error)})."
            raise EngineDeadError(reason, "Restart the engine.") from error
