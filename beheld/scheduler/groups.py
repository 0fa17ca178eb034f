"""The block tables of all KV groups: what fits, what is taken, what is given back, and what a prefix hit brings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from beheld.core.config import KVGroup
from beheld.scheduler.blocks import NULL_BLOCK, BlockPool
from beheld.scheduler.prefix import extend_keys, longest_run, longest_window
from beheld.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A group that has blocks of its own.

    Attributes:
        group: its index.
        pool: its blocks.
        window: positions that a query sees, itself included; None if all.
    """

    group: int
    pool: BlockPool
    window: int | None


class GroupTables:
    """All KV groups of a model. Their tables grow in step: block i of any group holds the same positions."""

    def __init__(self, groups: Ordered[KVGroup], num_blocks: Ordered[int], block_size: int, *, caching: bool) -> None:
        assert len(groups) == len(num_blocks), "one number of blocks for each KV group"
        self.num_groups = len(groups)
        self.block_size = block_size
        self._caching = caching
        self.stores = tuple(
            Store(index, BlockPool(num_blocks[index]), group.window)
            for index, group in enumerate(groups)
            if _has_store(group)
        )
        assert self.stores, "some group must keep keys and values"
        self._sliding = tuple(store for store in self.stores if store.window is not None)
        self.no_blocks: tuple[tuple[int, ...], ...] = ((),) * self.num_groups

    @property
    def num_free(self) -> int:
        """Blocks that every group can still give."""
        return min(store.pool.num_free for store in self.stores)

    @property
    def num_free_by_group(self) -> tuple[int, ...]:
        """For each group, blocks it can still give; 0 where it has none of its own."""
        free = {store.group: store.pool.num_free for store in self.stores}
        return tuple(free.get(group, 0) for group in range(self.num_groups))

    def most_positions(self) -> int | None:
        """Positions that one sequence alone can ever hold; None if every group slides."""
        full = [store.pool.num_blocks - 1 for store in self.stores if store.window is None]
        return min(full) * self.block_size if full else None

    def fits_slice(self, length: int, total: int) -> bool:
        """True if sliding groups, all to one sequence of `total` positions, can hold a slice and all that it sees."""
        whole = -(-total // self.block_size)
        return all(min(whole, self._blocks_seen(store, length)) <= store.pool.num_blocks - 1 for store in self._sliding)

    def _blocks_seen(self, store: Store, length: int) -> int:
        """Most blocks of a sliding group that a slice of `length` sees, itself included.

        n neighbouring positions lie in at most (n - 2) // block_size + 2 blocks.
        """
        assert store.window is not None
        seen = store.window - 1 + length
        return 1 if seen == 1 else (seen - 2) // self.block_size + 2

    def slide(self, sequence: Sequence) -> None:
        """Give back the blocks that no position from `num_computed` on will see.

        block 0 | block 1 | block 2 | block 3
                      ^ num_computed - window + 1     ^ num_computed          -> block 0 goes
        """
        for store in self._sliding:
            assert store.window is not None
            stop = max(0, sequence.num_computed - store.window + 1) // self.block_size
            first = sequence.kept[store.group]
            if stop > first:
                table = sequence.tables[store.group]
                store.pool.free(table[first:stop])
                table[first:stop] = [NULL_BLOCK] * (stop - first)
                sequence.kept[store.group] = stop

    def extend(self, sequence: Sequence, stop: int) -> tuple[tuple[int, ...], ...]:
        """Append blocks until there is room for positions before `stop`; returns them, group by group."""
        count = -(-(stop - sequence.num_slots) // self.block_size)
        if count <= 0:
            return self.no_blocks
        added = [*self.no_blocks]
        for store in self.stores:
            blocks = store.pool.allocate(count)
            sequence.tables[store.group] += blocks
            added[store.group] = tuple(blocks)
        sequence.num_slots += count * self.block_size
        return tuple(added)

    def truncate(self, sequence: Sequence) -> None:
        """Give back the blocks behind `num_computed`, which a slice took for drafts that were wrong."""
        count = -(-sequence.num_computed // self.block_size)
        for store in self.stores:
            table = sequence.tables[store.group]
            store.pool.free(reversed(table[count:]))
            del table[count:]
        sequence.num_slots = min(sequence.num_slots, count * self.block_size)

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks, the tail first: the head is the part that others are most likely to share."""
        for store in self.stores:
            table = sequence.tables[store.group]
            store.pool.free(reversed(table))
            table.clear()

    def find_hit(self, sequence: Sequence) -> int:
        """Blocks at the head of a waiting sequence that every group still has.

        At least the last known token is left to compute, since its logits are wanted. The hit does not end strictly
        inside a range that is computed in one step.
        """
        if not self._caching or not sequence.may_hit:
            return 0
        limit = self._longest_run(sequence, (len(sequence.token_ids) - 1) // self.block_size)
        keys = extend_keys(sequence, limit, self.block_size)
        while True:
            before = limit
            for store in self._sliding:
                assert store.window is not None
                limit = longest_window(store.pool, keys, limit, store.window, self.block_size)
            for start, stop in sequence.whole:
                if start < limit * self.block_size < stop:
                    limit = start // self.block_size
            if limit == before:
                return limit

    def _longest_run(self, sequence: Sequence, limit: int) -> int:
        """How many of the first `limit` blocks all groups that keep everything have without a gap.

        Keys take long, and those behind a gap are of no use now: each piece is twice as long as the one before.
        """
        pools = [store.pool for store in self.stores if store.window is None]
        if not pools:
            return limit
        found, piece = 0, 1
        while found < limit:
            stop = min(limit, found + piece)
            keys = extend_keys(sequence, stop, self.block_size)
            for pool in pools:
                stop = longest_run(pool, keys, stop, found)
            if stop < min(limit, found + piece):
                return stop
            found, piece = stop, 2 * piece
        return found

    def reach(self, sequence: Sequence, num_hit: int) -> int:
        """How far a waiting sequence could be computed now, after taking a hit of `num_hit` blocks.

        0 if a group has no room for what it must keep of all that is known (a sliding one: of as much as it sees): a
        sequence that starts and then waits for blocks would only keep them from those that run.
        """
        whole = -(-min(len(sequence.token_ids), sequence.most_positions) // self.block_size)
        most = whole
        for store in self.stores:
            hit = self._hit_blocks(store, sequence, num_hit)
            free = store.pool.num_free - sum(store.pool.is_free(block) for block in hit if block != NULL_BLOCK)
            kept = sum(block != NULL_BLOCK for block in hit)
            if kept + free < (whole if store.window is None else min(whole, self._blocks_seen(store, 1))):
                return 0
            most = min(most, num_hit + free)
        return most * self.block_size

    def take_hit(self, sequence: Sequence, num_hit: int) -> tuple[tuple[int, ...], ...]:
        """Put the blocks of the hit into the tables; returns them, group by group."""
        for store in self.stores:
            blocks = self._hit_blocks(store, sequence, num_hit)
            for block in blocks:
                if block != NULL_BLOCK:
                    store.pool.share(block)
            sequence.tables[store.group] += blocks
            sequence.kept[store.group] = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), num_hit)
        sequence.num_slots = num_hit * self.block_size
        sequence.num_keyed = num_hit
        return tuple(map(tuple, sequence.tables))

    def _hit_blocks(self, store: Store, sequence: Sequence, num_hit: int) -> list[int]:
        """The table of a hit: null blocks where a sliding group will not look any more."""
        first = 0
        if store.window is not None:
            first = max(0, num_hit * self.block_size - store.window + 1) // self.block_size
        blocks = [NULL_BLOCK] * min(first, num_hit)
        for key in sequence.block_keys[first:num_hit]:
            block = store.pool.find(key)
            assert block is not None, "a hit has lost its block"
            blocks.append(block)
        return blocks

    def register(self, sequence: Sequence, stop: int) -> None:
        """Positions before `stop` have been computed and their tokens are known: their full blocks may be shared."""
        count = stop // self.block_size
        if not self._caching or count <= sequence.num_keyed:
            return
        keys = extend_keys(sequence, count, self.block_size)
        for store in self.stores:
            table = sequence.tables[store.group]
            for index in range(sequence.num_keyed, count):
                if table[index] != NULL_BLOCK:
                    store.pool.set_key(table[index], keys[index])
        sequence.num_keyed = count

    def drop_keys(self, sequence: Sequence) -> None:
        """Nobody may share any block of this sequence: one of them is broken, and it is not known which."""
        for store in self.stores:
            for key in sequence.block_keys:
                store.pool.drop_key(key)

    def clear(self) -> None:
        """Forget every cached prefix."""
        for store in self.stores:
            store.pool.clear_keys()

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert every invariant of pools and tables."""
        counts: list[Counter[int]] = [Counter() for _ in range(self.num_groups)]
        for sequence in running:
            assert sequence.num_computed <= sequence.num_slots
            for store in self.stores:
                table, kept = sequence.tables[store.group], sequence.kept[store.group]
                assert len(table) * self.block_size == sequence.num_slots, "tables of different length"
                assert all(block == NULL_BLOCK for block in table[:kept]), "a block that slid out is still there"
                assert all(block != NULL_BLOCK for block in table[kept:]), "a block that is seen is missing"
                if store.window is None:
                    assert kept == 0, "a group that keeps everything lost a block"
                counts[store.group].update(table[kept:])
        for store in self.stores:
            store.pool.check(counts[store.group])


def _has_store(group: KVGroup) -> bool:
    assert group.kind in ("full", "sliding", "chunked", "conv", "shared", "cross"), group.kind
    windowed = group.kind in ("sliding", "chunked", "conv")
    assert windowed == (group.window is not None), "a window belongs to a group that looks back only so far"
    # What stands beside the text takes no blocks: see holding.py.
    return group.kind not in ("shared", "cross")
