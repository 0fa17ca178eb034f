"""What the scheduler asks of a group of layers that keep something on the device.

The other half, which tensors the device holds, is `runner/cache/cache.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from typing import Protocol

from beheld.scheduler.cache.prefix import PrefixKeys
from beheld.scheduler.sequence import Sequence


class CacheGroup(Protocol):
    """One layer group's part of the cache: what a slice needs, what is given back when, what a prefix hit brings.

    A sequence has one table per group (`Sequence.tables`). All tables grow in step, block i of each stands for the same
    positions, and a group that keeps nothing there puts the null block into its table:

        positions        0 .. 3 | 4 .. 7 | 8 .. 11      block_size 4, num_computed 10
        keeps all           5   |    9   |    2
        a window of 4       0   |    7   |    3         the first block was given back
        a state             0   |    6   |    8         of 6, the state after position 7; of 8, that after position 9

    Positions are scheduled before they are computed. The device carries out plans in order, so a block that is given
    back may be handed on at once.
    """

    index: int
    """Which of ModelInfo.kv_groups it is."""
    extends_hits: bool
    """True if every prefix of a hit is a hit too, so that the coordinator need not ask twice."""
    can_truncate: bool
    """True if positions computed last can be taken back; without, no draft tokens are checked."""

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out in all; 0 if it has none."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, those with cached content included; 0 if it has none."""

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be shared."""

    @property
    def has_room(self) -> bool:
        """True unless each sequence that needs another block would have to wait for one."""

    def most_positions(self) -> int | None:
        """Positions that one sequence alone can ever hold; None if there is no bound."""

    def fits(self, length: int, total: int) -> bool:
        """True if one sequence of `total` positions, alone, can compute a slice of `length` wherever it starts."""

    def reach(self, sequence: Sequence, stop: int) -> int:
        """How far, up to `stop`, blocks that are free now let a running sequence go."""

    def reach_of_hit(self, sequence: Sequence, num_hit: int, total: int) -> int:
        """How far, up to `total`, a waiting sequence could go after taking a hit of `num_hit` blocks.

        0 if there is no room for what it must keep of `total` positions: a sequence that starts and then waits for
        blocks would only keep them from those that run.
        """

    def extend(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Append `count` entries to the table, which `reach` has allowed; returns them."""

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks that no position from `num_computed` on needs."""

    def truncate(self, sequence: Sequence, count: int) -> None:
        """Cut the table to `count` entries: positions beyond were computed with wrong draft tokens."""

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks; the table is empty afterwards."""

    def longest_hit(self, keys: PrefixKeys, limit: int) -> int:
        """The most blocks, up to `limit`, that this group can continue: what it needs of them is cached."""

    def take_hit(self, sequence: Sequence, num_hit: int) -> tuple[int, ...]:
        """Put the blocks of a hit into an empty table; returns it."""

    def register(self, sequence: Sequence, start: int, stop: int, keys: Ordered[bytes]) -> None:
        """Blocks from `start` to before `stop` are computed and known: they may be shared under these keys."""

    def drop_keys(self, keys: Iterable[bytes]) -> None:
        """The blocks that have these keys may not be shared any more."""

    def clear(self) -> None:
        """No block may be shared any more."""

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert every invariant; no sequence but the running ones holds blocks."""
