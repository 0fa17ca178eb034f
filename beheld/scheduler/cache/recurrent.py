"""Recurrent layers: one state a sequence, and states kept for others to continue from."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from beheld.core.config import KVGroup
from beheld.scheduler.cache.blocks import NULL_BLOCK
from beheld.scheduler.cache.paged import PagedGroup
from beheld.scheduler.sequence import Sequence


class RecurrentGroup(PagedGroup):
    """See CacheGroup; a block holds the state of all layers after one position.

    A sequence needs the state after its last computed position, in the last entry of its table. When it enters another
    block of positions, that state's block moves along and is overwritten, unless the state there is to be kept: then
    it stays as a checkpoint, and the sequence goes on in another block.

        positions   0 .. 3 | 4 .. 7 | 8 .. 11 | 12 .. 15        block_size 4, num_computed 14
        table          0   |    6   |    0    |    8            of 6, the state after position 7: a checkpoint;
                                                                of 8, that after position 13

    Which states are kept, `Sequence.checkpoints` says for its prompt. Of its answer every `checkpoint_tokens`-th is,
    and the newest at the end of a block, in whose place the next one comes: when the answer ends, the next turn can
    continue from there. Checkpoints only take blocks of which there are plenty, and the least recently used ones go
    when blocks are needed.
    """

    # Of the positions of a slice, the state after the last alone is there.
    can_truncate = False

    def __init__(self, spec: KVGroup, index: int, num_blocks: int, block_size: int) -> None:
        super().__init__(spec, index, num_blocks, block_size)
        self._every = max(1, spec.checkpoint_tokens // block_size)
        self._spare = max(1, self.num_blocks // 4)

    def first_needed(self, num_computed: int) -> int:
        """The block that holds the state after the last computed position."""
        return max(0, num_computed - 1) // self._block_size

    def needed(self, length: int, total: int) -> int:
        """A state to continue from, which others share, and one of its own."""
        return min(2, -(-total // self._block_size))

    def reach(self, sequence: Sequence, stop: int) -> int:
        """One block takes it anywhere, its own too."""
        table = sequence.tables[self.index]
        own = bool(table) and table[-1] != NULL_BLOCK and not self.pool.is_shared(table[-1])
        return stop if own or self.pool.num_free else min(stop, sequence.num_slots)

    def reach_of_hit(self, sequence: Sequence, num_hit: int, total: int) -> int:
        """As `reach`, after the checkpoint was taken."""
        hit = [block for block in self._hit_blocks(sequence, num_hit) if block != NULL_BLOCK]
        return total if self.pool.num_free > sum(map(self.pool.is_free, hit)) else 0

    def extend(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """One block for the newest state, and blocks for checkpoints before it as long as there are plenty."""
        table = sequence.tables[self.index]
        blocks = [NULL_BLOCK] * (count - 1) + [self._newest(sequence)]
        # The last ones first: they are prefixes of the most.
        for place in range(count - 2, -1, -1):
            if self._has_spare and self._keeps(sequence, len(table) + place):
                blocks[place] = self.pool.allocate(1)[0]
        table += blocks
        return tuple(blocks)

    def _newest(self, sequence: Sequence) -> int:
        """The block that the newest state moves to."""
        table = sequence.tables[self.index]
        if not table or self.pool.is_shared(table[-1]):
            return self.pool.allocate(1)[0]
        block, index = table[-1], len(table) - 1
        wanted = self._keeps(sequence, index) or self._keeps_for_now(sequence, index)
        if (wanted and self._has_spare) or (self.pool.has_key(block) and self.pool.num_free):
            return self.pool.allocate(1)[0]
        table[-1] = NULL_BLOCK
        self.pool.forget(block)
        return block

    @property
    def _has_spare(self) -> bool:
        return self.pool.num_free > self._spare

    def _keeps(self, sequence: Sequence, index: int) -> bool:
        """True if the state at the end of this block of a sequence is to be kept."""
        kept, stop = sequence.checkpoints, (index + 1) * self._block_size
        if kept is None:
            return False
        return index in kept or (stop >= sequence.num_prompt and (index + 1) % self._every == 0)

    def _keeps_for_now(self, sequence: Sequence, index: int) -> bool:
        """True if it is to be kept until there is a later one."""
        if sequence.checkpoints is None or self._keeps(sequence, index):
            return False
        return (index + 1) * self._block_size >= sequence.num_prompt

    def release(self, sequence: Sequence) -> None:
        """Checkpoints stay until their keys are known, else nobody could find them."""
        first = sequence.kept[self.index]
        stop = max(first, min(self.first_needed(sequence.num_computed), sequence.num_keyed))
        table = sequence.tables[self.index]
        self.pool.free(table[first:stop])
        table[first:stop] = [NULL_BLOCK] * (stop - first)
        sequence.kept[self.index] = stop

    def register(self, sequence: Sequence, start: int, stop: int, keys: Ordered[bytes]) -> None:
        """Of an answer's checkpoints, one takes the place of the one before it."""
        table = sequence.tables[self.index]
        for index in range(start, stop):
            kept = self._keeps(sequence, index) or self._keeps_for_now(sequence, index)
            if table[index] == NULL_BLOCK or not kept:
                continue
            self.pool.set_key(table[index], keys[index])
            if index and self._keeps_for_now(sequence, index - 1):
                self.pool.drop_key(keys[index - 1])

    def check_kept(self, blocks: Ordered[int]) -> None:
        """The newest state is there."""
        assert not blocks or blocks[-1] != NULL_BLOCK, "the newest state is gone"
