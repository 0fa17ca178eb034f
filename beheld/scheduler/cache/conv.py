"""Short convolutions, which keep the inputs of the last L positions."""

from __future__ import annotations

from beheld.core.config import KVGroup
from beheld.scheduler.cache.sliding import SlidingGroup
from beheld.scheduler.sequence import Sequence


class ConvGroup(SlidingGroup):
    """A convolution of length L needs the positions of a window of L; its inputs are kept as keys would be.

    A prefix needs the inputs before its end alone. They take much memory, so few are kept: those within a prompt are
    forgotten before those where other prompts are likely to part from it (see checkpoints.py), or have parted.
    """

    def __init__(self, spec: KVGroup, index: int, num_blocks: int, block_size: int) -> None:
        super().__init__(spec, index, num_blocks, block_size)
        # Blocks that hold the inputs before the end of a block, that one included.
        self._span = max(1, -(-(self._window - 1) // block_size))

    def give_back(self, sequence: Sequence, start: int, stop: int) -> None:
        """See PagedGroup."""
        table, kept = sequence.tables[self.index], sequence.checkpoints or frozenset()
        found = (sequence.num_cached or 0) // self._block_size
        for index in range(start, stop):
            needed = index < found or not kept.isdisjoint(range(index, index + self._span))
            self.pool.free((table[index],), before_others=not needed)
