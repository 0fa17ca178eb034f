"""Short convolutions, which keep the inputs of the last L positions."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from beheld.core.config import KVGroup
from beheld.scheduler.cache.blocks import NULL_BLOCK
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
        """See PagedGroup. With steps in flight, a block may have no key yet: then it gets one that nobody looks for."""
        table = sequence.tables[self.index]
        for index in range(start, stop):
            block, needed = table[index], self._is_needed(sequence, index)
            if needed and index >= sequence.num_keyed and block != NULL_BLOCK:
                key = _early_key(sequence, index)
                # An earlier request of this name may have left one.
                self.pool.drop_key(key)
                self.pool.set_key(block, key)
            self.pool.free((block,), before_others=not needed)

    def register(self, sequence: Sequence, start: int, stop: int, keys: Ordered[bytes]) -> None:
        """See CacheGroup."""
        super().register(sequence, start, stop, keys)
        table = sequence.tables[self.index]
        for index in range(start, min(stop, sequence.kept[self.index])):
            if table[index] == NULL_BLOCK and self._is_needed(sequence, index):
                self.pool.rename_key(_early_key(sequence, index), keys[index])

    def _is_needed(self, sequence: Sequence, index: int) -> bool:
        """True if other prompts are likely to continue from what this block holds."""
        if sequence.checkpoints is None:
            return False
        found = (sequence.num_cached or 0) // self._block_size
        return index < found or not sequence.checkpoints.isdisjoint(range(index, index + self._span))


def _early_key(sequence: Sequence, index: int) -> bytes:
    """The key of a block whose positions are still being computed."""
    return f"{sequence.request.id} {sequence.epoch} {index}".encode()
