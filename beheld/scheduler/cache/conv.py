"""Short convolutions: the inputs of as many positions as a convolution is long."""

from __future__ import annotations

from beheld.scheduler.cache.sliding import SlidingGroup


class ConvGroup(SlidingGroup):
    """A convolution over L positions looks as far back as a window of L, and its inputs are kept as keys would be."""
