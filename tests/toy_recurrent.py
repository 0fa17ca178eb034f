"""A kind of cache group that only tests know: a recurrent state with checkpoints. The scheduler's half.

A sequence needs one state, that after its last computed position. It is kept in the last block of its table; blocks
before that are null, but for checkpoints, which let others continue from there:

    block       0   1   2   3   4   5        a checkpoint every second block, if there is room for it
    table       0   4   0   7   0   2        of 4, the state after block 1; of 7, after block 3; of 2, the newest
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from beheld.core.config import KVGroup
from beheld.scheduler.cache import registry
from beheld.scheduler.cache.blocks import NULL_BLOCK
from beheld.scheduler.cache.paged import PagedGroup
from beheld.scheduler.sequence import Sequence

KIND = "toy recurrent"
EVERY = 2
RECURRENT = KVGroup(KIND, (4,), 1, 1, 0)


class ToyRecurrentGroup(PagedGroup):
    """See CacheGroup."""

    # Of the positions of a slice, it keeps the state after the last alone.
    can_truncate = False

    def first_needed(self, num_computed: int) -> int:
        """The block that holds the state after the last computed position."""
        return max(0, num_computed - 1) // self._block_size

    def needed(self, length: int, total: int) -> int:
        """The state before a slice and the one after it."""
        return min(2, -(-total // self._block_size))

    def reach(self, sequence: Sequence, stop: int) -> int:
        """One block takes it anywhere."""
        return stop if self.pool.num_free else min(stop, sequence.num_slots)

    def reach_of_hit(self, sequence: Sequence, num_hit: int, total: int) -> int:
        """As `reach`, after the checkpoint was taken."""
        hit = [block for block in self._hit_blocks(sequence, num_hit) if block != NULL_BLOCK]
        return total if self.pool.num_free > sum(map(self.pool.is_free, hit)) else 0

    def extend(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """One block for the newest state, and checkpoints before it as long as there is room."""
        table = sequence.tables[self.index]
        blocks = [NULL_BLOCK] * (count - 1) + self.pool.allocate(1)
        for place in range(count - 1):
            if (len(table) + place + 1) % EVERY == 0 and self.pool.num_free > 1:
                blocks[place] = self.pool.allocate(1)[0]
        table += blocks
        return tuple(blocks)

    def check_kept(self, blocks: Ordered[int]) -> None:
        """The newest state is there."""
        assert not blocks or blocks[-1] != NULL_BLOCK, "the newest state is gone"


registry.KINDS[KIND] = ToyRecurrentGroup
