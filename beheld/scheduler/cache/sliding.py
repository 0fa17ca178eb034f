"""Sliding-window attention: a position is kept as long as a later one sees it."""

from __future__ import annotations

from beheld.core.config import KVGroup
from beheld.scheduler.cache.paged import PagedGroup


class SlidingGroup(PagedGroup):
    """See CacheGroup; a query sees `window` positions, itself included.

    block 0 | block 1 | block 2 | block 3
                  ^ num_computed - window + 1     ^ num_computed          -> block 0 is given back
    """

    def __init__(self, spec: KVGroup, index: int, num_blocks: int, block_size: int) -> None:
        super().__init__(spec, index, num_blocks, block_size)
        assert spec.window is not None, "a window belongs to a group that looks back only so far"
        self._window = spec.window

    def first_needed(self, num_computed: int) -> int:
        """The block of the first position that the next one sees."""
        return max(0, num_computed - self._window + 1) // self._block_size

    def needed(self, length: int, total: int) -> int:
        """Most blocks that a slice of `length` sees, itself included, but no more than the whole sequence has.

        n neighbouring positions lie in at most (n - 2) // block_size + 2 blocks.
        """
        seen = self._window - 1 + length
        blocks = 1 if seen == 1 else (seen - 2) // self._block_size + 2
        return min(blocks, -(-total // self._block_size))
