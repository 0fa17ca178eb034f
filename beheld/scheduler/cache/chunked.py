"""Chunked attention: a query sees the positions of its own chunk alone."""

from __future__ import annotations

from beheld.scheduler.cache.sliding import SlidingGroup


class ChunkedGroup(SlidingGroup):
    """Blocks are kept as for a window of the chunk's length.

    Some kernels read that far back and hide what is before the chunk, so it must still be the sequence's own.
    """
