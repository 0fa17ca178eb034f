"""A histogram that is cheap to fill: counts of values by the bounds that they lie within."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Tally:
    """Values counted by bounds, and their sum.

    Args:
        bounds: in order; a value counts for the first that is not smaller, or for none.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, several times at once if it stands for several."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
