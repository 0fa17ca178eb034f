"""Short convolutions, which keep the inputs of the last L positions."""

from __future__ import annotations

from beheld.scheduler.cache.sliding import SlidingGroup


class ConvGroup(SlidingGroup):
    """A convolution of length L needs the positions of a window of L; its inputs are kept as keys would be."""
