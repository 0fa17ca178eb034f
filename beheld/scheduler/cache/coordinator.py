"""The cache groups of a model as one: what fits into all of them, and the prefix that all of them can continue."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from beheld.core.config import KVGroup
from beheld.scheduler.cache.prefix import PrefixKeys, extend_keys
from beheld.scheduler.cache.registry import make_groups
from beheld.scheduler.sequence import Sequence


class CacheCoordinator:
    """Asks every CacheGroup, and gives the answer that suits them all.

    Attributes:
        groups: in the order of ModelInfo.kv_groups.
        no_blocks: what a slice that needs no new block adds to the tables.
    """

    def __init__(self, specs: Ordered[KVGroup], num_blocks: Ordered[int], block_size: int, *, caching: bool) -> None:
        self.groups = make_groups(specs, num_blocks, block_size)
        assert not specs or any(group.num_blocks for group in self.groups), "some group must have blocks"
        # First those that narrow a hit for good, then those that must be asked until all agree.
        self._asked_once = tuple(group for group in self.groups if group.extends_hits)
        self._asked_again = tuple(group for group in self.groups if not group.extends_hits)
        self._block_size = block_size
        self._caching = caching
        self.no_blocks: tuple[tuple[int, ...], ...] = ((),) * len(self.groups)
        bounds = [most for group in self.groups if (most := group.most_positions()) is not None]
        self._most_positions = min(bounds, default=None)

    @property
    def has_room(self) -> bool:
        """False if a group has no block left to give."""
        return not self.groups or all(group.has_room for group in self.groups)

    def most_positions(self) -> int | None:
        """Positions that one sequence alone can ever hold; None if there is no bound."""
        return self._most_positions

    def fits(self, length: int, total: int) -> bool:
        """True if one sequence of `total` positions, alone, can compute a slice of `length` wherever it starts."""
        return all(group.fits(length, total) for group in self.groups)

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks that no position from `num_computed` on needs."""
        for group in self.groups:
            group.release(sequence)

    def reach(self, sequence: Sequence, stop: int) -> int:
        """How far, up to `stop`, blocks that are free now let a running sequence go."""
        for group in self.groups:
            stop = group.reach(sequence, stop)
        return stop

    def extend(self, sequence: Sequence, stop: int) -> tuple[tuple[int, ...], ...]:
        """Append to the tables until they cover the positions before `stop`; returns what was added, by group."""
        count = -(-(stop - sequence.num_slots) // self._block_size)
        if count <= 0:
            return self.no_blocks
        added = tuple([group.extend(sequence, count) for group in self.groups])
        sequence.num_slots += count * self._block_size
        return added

    @property
    def can_truncate(self) -> bool:
        """True if positions computed last can be taken back."""
        return all(group.can_truncate for group in self.groups)

    def truncate(self, sequence: Sequence) -> None:
        """Give back the blocks beyond `num_computed`: they were computed with wrong draft tokens."""
        count = -(-sequence.num_computed // self._block_size)
        for group in self.groups:
            group.truncate(sequence, count)
        sequence.num_slots = min(sequence.num_slots, count * self._block_size)

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence."""
        for group in self.groups:
            group.free(sequence)

    def find_hit(self, sequence: Sequence) -> int:
        """How many blocks at the head of a waiting sequence need not be computed: the most that suit all groups.

        At least the last known token is left to compute, since its logits are wanted. The hit does not end strictly
        inside a range that is computed in one step.
        """
        if not self._caching or not sequence.may_hit:
            return 0
        size = self._block_size
        keys, limit = PrefixKeys(sequence, size), (len(sequence.token_ids) - 1) // size
        for group in self._asked_once:
            limit = group.longest_hit(keys, limit)
        while True:
            before = limit
            for group in self._asked_again:
                limit = group.longest_hit(keys, limit)
            limit = self.whole(sequence, limit)
            if limit == before:
                return limit

    def whole(self, sequence: Sequence, num_blocks: int) -> int:
        """How many of these blocks at its head a sequence can continue: not inside a range that one step computes."""
        size = self._block_size
        for start, stop in reversed(sequence.atomic):
            if start < num_blocks * size < stop:
                num_blocks = start // size
        return num_blocks

    def reach_of_hit(self, sequence: Sequence, num_hit: int) -> int:
        """How far a waiting sequence could be computed now, after taking a hit of `num_hit` blocks.

        0 if a group has no room for what it must keep of all that is known.
        """
        stop = total = min(len(sequence.token_ids), sequence.most_positions)
        for group in self.groups:
            stop = min(stop, group.reach_of_hit(sequence, num_hit, total))
        return stop

    def take_hit(self, sequence: Sequence, num_hit: int) -> tuple[tuple[int, ...], ...]:
        """Put the blocks of the hit into the tables; returns them, by group."""
        tables = tuple([group.take_hit(sequence, num_hit) for group in self.groups])
        sequence.num_slots = num_hit * self._block_size
        sequence.num_keyed = num_hit
        return tables

    def register(self, sequence: Sequence, stop: int) -> None:
        """Positions before `stop` have been computed and their tokens are known: their full blocks may be shared."""
        count, known = stop // self._block_size, sequence.num_keyed
        if not self._caching or count <= known:
            return
        keys = extend_keys(sequence, count, self._block_size)
        for group in self.groups:
            group.register(sequence, known, count, keys)
        sequence.num_keyed = count

    def drop_keys(self, sequence: Sequence) -> None:
        """No block of this sequence may be shared any more: one of them is broken, and it is not known which."""
        for group in self.groups:
            group.drop_keys(sequence.block_keys)

    def clear(self) -> None:
        """Forget every cached prefix."""
        for group in self.groups:
            group.clear()

    def check(self, running: Ordered[Sequence]) -> None:
        """Assert every invariant of all groups; `running` sequences alone hold blocks."""
        assert all(sequence.num_computed <= sequence.num_slots for sequence in running)
        for group in self.groups:
            group.check(running)
