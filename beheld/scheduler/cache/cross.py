"""Cross attention: keys and values of media items, which are made once and never grow."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from beheld.core.config import KVGroup
from beheld.scheduler.cache.prefix import PrefixKeys
from beheld.scheduler.sequence import Sequence


class CrossGroup:
    """See CacheGroup; it has no blocks and limits no slice.

    Its states belong to items, not to positions. They are counted with the embeddings (`EncoderBudget`), a sequence
    holds those of all its items while it runs (`EncoderRefs`), and block keys contain the items' digests, so a hit
    of the other groups needs and brings nothing here.
    """

    extends_hits = can_truncate = True
    num_blocks = num_free = num_cached = 0
    has_room = True

    def __init__(self, spec: KVGroup, index: int, num_blocks: int, block_size: int) -> None:
        self.index = index

    def most_positions(self) -> int | None:
        """See CacheGroup."""
        return None

    def fits(self, length: int, total: int) -> bool:
        """See CacheGroup."""
        return True

    def reach(self, sequence: Sequence, stop: int) -> int:
        """See CacheGroup."""
        return stop

    def reach_of_hit(self, sequence: Sequence, num_hit: int, total: int) -> int:
        """See CacheGroup."""
        return total

    def extend(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """See CacheGroup."""
        return ()

    def release(self, sequence: Sequence) -> None:
        """See CacheGroup."""

    def truncate(self, sequence: Sequence, count: int) -> None:
        """See CacheGroup."""

    def free(self, sequence: Sequence) -> None:
        """See CacheGroup."""

    def longest_hit(self, keys: PrefixKeys, limit: int) -> int:
        """See CacheGroup."""
        return limit

    def take_hit(self, sequence: Sequence, num_hit: int) -> tuple[int, ...]:
        """See CacheGroup."""
        return ()

    def register(self, sequence: Sequence, start: int, stop: int, keys: Ordered[bytes]) -> None:
        """See CacheGroup."""

    def drop_keys(self, keys: Iterable[bytes]) -> None:
        """See CacheGroup."""

    def clear(self) -> None:
        """See CacheGroup."""

    def check(self, running: Iterable[Sequence]) -> None:
        """See CacheGroup."""
        assert not any(sequence.tables[self.index] for sequence in running), "a group without blocks has some"
