"""What all groups have in common that keep something of each position in blocks, for as long as later ones need it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from beheld.core.config import KVGroup
from beheld.scheduler.cache.blocks import NULL_BLOCK, BlockPool
from beheld.scheduler.cache.prefix import PrefixKeys
from beheld.scheduler.sequence import Sequence


class PagedGroup(ABC):
    """Tables over a pool of blocks; see CacheGroup. What a kind keeps, and for how long, its own class says.

    Attributes:
        pool: its blocks.
    """

    extends_hits = False
    can_truncate = True

    def __init__(self, spec: KVGroup, index: int, num_blocks: int, block_size: int) -> None:
        self.index = index
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size

    # ---- what a kind decides -----------------------------------------------------------------------------------------

    @abstractmethod
    def first_needed(self, num_computed: int) -> int:
        """The first block that a position from `num_computed` on needs."""

    @abstractmethod
    def needed(self, length: int, total: int) -> int:
        """Most blocks that a slice of `length` needs at a time, of a sequence of `total` positions."""

    # ---- what follows from it ----------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Without the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_free(self) -> int:
        """See CacheGroup."""
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """See CacheGroup."""
        return self.pool.num_cached

    @property
    def has_room(self) -> bool:
        """See CacheGroup."""
        return self.pool.num_free > 0

    def most_positions(self) -> int | None:
        """See CacheGroup."""
        return None

    def fits(self, length: int, total: int) -> bool:
        """See CacheGroup."""
        return self.needed(length, total) <= self.num_blocks

    def reach(self, sequence: Sequence, stop: int) -> int:
        """See CacheGroup."""
        return min(stop, sequence.num_slots + self.pool.num_free * self._block_size)

    def reach_of_hit(self, sequence: Sequence, num_hit: int, total: int) -> int:
        """See CacheGroup."""
        hit = [block for block in self._hit_blocks(sequence, num_hit) if block != NULL_BLOCK]
        free = self.pool.num_free - sum(map(self.pool.is_free, hit))
        if len(hit) + free < self.needed(1, total):
            return 0
        return min(total, (num_hit + free) * self._block_size)

    def extend(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """See CacheGroup."""
        blocks = self.pool.allocate(count)
        sequence.tables[self.index] += blocks
        return tuple(blocks)

    def release(self, sequence: Sequence) -> None:
        """See CacheGroup."""
        stop, first = self.first_needed(sequence.num_computed), sequence.kept[self.index]
        if stop > first:
            self.give_back(sequence, first, stop)
            sequence.tables[self.index][first:stop] = [NULL_BLOCK] * (stop - first)
            sequence.kept[self.index] = stop

    def give_back(self, sequence: Sequence, start: int, stop: int) -> None:
        """Free the blocks from `start` to before `stop`, which the sequence needs no more while it goes on."""
        self.pool.free(sequence.tables[self.index][start:stop])

    def truncate(self, sequence: Sequence, count: int) -> None:
        """See CacheGroup."""
        table = sequence.tables[self.index]
        self.pool.free(reversed(table[count:]))
        del table[count:]

    def free(self, sequence: Sequence) -> None:
        """The tail goes first: the head is the part that others are most likely to share."""
        table = sequence.tables[self.index]
        self.pool.free(reversed(table))
        table.clear()

    def longest_hit(self, keys: PrefixKeys, limit: int) -> int:
        """The longest prefix all of whose blocks that the next position needs are cached."""
        if limit == 0:
            return 0
        known, holds = keys.first(limit), self.pool.holds
        length = limit
        while length > 0:
            low, index = self.first_needed(length * self._block_size), length - 1
            while index >= low and holds(known[index]):
                index -= 1
            if index < low:
                return length
            # Whatever ends between the missing block and here needs that block too.
            length = index
        return 0

    def take_hit(self, sequence: Sequence, num_hit: int) -> tuple[int, ...]:
        """See CacheGroup."""
        blocks = self._hit_blocks(sequence, num_hit)
        for block in blocks:
            if block != NULL_BLOCK:
                self.pool.share(block)
        sequence.tables[self.index] += blocks
        sequence.kept[self.index] = min(self.first_needed(num_hit * self._block_size), num_hit)
        return tuple(blocks)

    def _hit_blocks(self, sequence: Sequence, num_hit: int) -> list[int]:
        """The table of a hit: null blocks where nothing will be needed any more."""
        first = min(self.first_needed(num_hit * self._block_size), num_hit)
        blocks = [NULL_BLOCK] * first
        for key in sequence.block_keys[first:num_hit]:
            block = self.pool.find(key)
            assert block is not None, "a hit has lost its block"
            blocks.append(block)
        return blocks

    def register(self, sequence: Sequence, start: int, stop: int, keys: Ordered[bytes]) -> None:
        """See CacheGroup."""
        table, set_key = sequence.tables[self.index], self.pool.set_key
        for index in range(start, stop):
            if table[index] != NULL_BLOCK:
                set_key(table[index], keys[index])

    def drop_keys(self, keys: Iterable[bytes]) -> None:
        """See CacheGroup."""
        for key in keys:
            self.pool.drop_key(key)

    def clear(self) -> None:
        """See CacheGroup."""
        self.pool.clear_keys()

    def check(self, running: Iterable[Sequence]) -> None:
        """See CacheGroup."""
        references: Counter[int] = Counter()
        for sequence in running:
            table, kept = sequence.tables[self.index], sequence.kept[self.index]
            assert len(table) * self._block_size == sequence.num_slots, "tables of different length"
            assert all(block == NULL_BLOCK for block in table[:kept]), "a block that was given back is still there"
            self.check_kept(table[kept:])
            references.update(block for block in table[kept:] if block != NULL_BLOCK)
        self.pool.check(references)

    def check_kept(self, blocks: Ordered[int]) -> None:
        """Assert that the part of a table that was not given back is as this kind wants it."""
        assert all(block != NULL_BLOCK for block in blocks), "a block that is needed is missing"
