"""Full attention: every position is kept until its sequence ends."""

from __future__ import annotations

from beheld.scheduler.cache.paged import PagedGroup
from beheld.scheduler.cache.prefix import PrefixKeys
from beheld.scheduler.sequence import Sequence


class FullGroup(PagedGroup):
    """See CacheGroup; a hit needs every block."""

    extends_hits = True

    def first_needed(self, num_computed: int) -> int:
        """All blocks are needed."""
        return 0

    def needed(self, length: int, total: int) -> int:
        """Blocks of the whole sequence."""
        return -(-total // self._block_size)

    def release(self, sequence: Sequence) -> None:
        """Nothing is given back before the end."""

    def most_positions(self) -> int | None:
        """As many as the pool has room for."""
        return self.num_blocks * self._block_size

    def fits(self, length: int, total: int) -> bool:
        """`most_positions` says how long a sequence may get; no slice needs more."""
        return True

    def longest_hit(self, keys: PrefixKeys, limit: int) -> int:
        """How many of the first `limit` blocks are cached without a gap.

        Keys take long to compute, and those after a gap are of no use: each piece is twice as long as the one before.
        """
        holds, found, piece = self.pool.holds, 0, 1
        while found < limit:
            stop = min(limit, found + piece)
            known = keys.first(stop)
            for index in range(found, stop):
                if not holds(known[index]):
                    return index
            found, piece = stop, 2 * piece
        return found
