"""Prefixes of prompts whose keys and values are kept outside of the engine, where other engines find them.

A waiting sequence asks for the blocks of its prompt that the prefix cache lacks. While they are read it is postponed,
so that others pass it; once they are in the host's memory it is admitted with them:

    block        0    1    2    3    4    5
                 hit  hit  read read |           the device loads 2 and 3, and computes from the start of 4

What is read is loaded by the plan that admits the sequence, before that plan computes. What a plan computes of a prompt
comes back with its result, and is then handed out to be kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Any, Protocol

from beheld.core.plan import BlockKeep, BlockLoad, StepPlan, StepResult
from beheld.core.request import Request
from beheld.scheduler.cache.prefix import extend_keys
from beheld.scheduler.sequence import Sequence, Status

if TYPE_CHECKING:
    import numpy as np

PATIENCE_S = 10.0
"""Seconds after which a sequence computes what has not been read."""
# Sequences that are set aside for want of room to read for them. To ask for a prompt's blocks, all of it is hashed.
_MOST_ASIDE = 64


class BlockReading(Protocol):
    """Blocks that are being read."""

    @property
    def ended(self) -> bool:
        """True once no more of them will come."""

    @property
    def blocks(self) -> Ordered[np.ndarray]:
        """The bytes of those that were found, from the first on without a gap; complete once it has ended."""

    @property
    def broken(self) -> str:
        """What was wrong with the block after them, if there was one that cannot be used."""


class PrefixStore(Protocol):
    """Keeps blocks by their keys. Only `wait` waits."""

    reads: bool
    """Whether blocks may be asked for."""
    writes: bool
    """Whether blocks are to be kept."""
    fails: bool
    """Whether a request fails if a block of it cannot be used."""

    def read(self, request: Request, first: int, keys: Ordered[bytes]) -> BlockReading | None:
        """Begin to read blocks of a request's prompt, up to the first that is not there; None if there is no room now.

        Args:
            request: the request.
            first: index of the first block.
            keys: the blocks' keys.
        """

    def forget(self, reading: Any) -> None:
        """What was read is not needed any more, or has been taken."""

    def wait(self, seconds: float) -> None:
        """Return when a reading has ended, after so many seconds at most."""

    @property
    def has_room(self) -> bool:
        """False while so much waits to be written that no more is taken."""

    def keep(self, keys: Ordered[bytes], parts: Ordered[np.ndarray]) -> None:
        """Keep these N blocks, whose bytes come in parts (N, bytes of the part)."""

    def drop(self, keys: Ordered[bytes]) -> None:
        """Forget these blocks: they may be broken."""


class _Nothing:
    """Nothing was read."""

    ended = True
    blocks: tuple[np.ndarray, ...] = ()
    broken = ""


class OutsideBlocks:
    """Which sequences wait for blocks that are read, and what was read for whom."""

    def __init__(self, store: PrefixStore, block_size: int) -> None:
        self._store = store
        self._size = block_size
        # Those that are postponed -> what is read for them, index of its first block, and when that began.
        self._reading: dict[Sequence, tuple[BlockReading, int, float]] = {}
        # Those that are postponed until there is room to read for them.
        self._crowd: deque[Sequence] = deque()
        # Those that are not admitted yet although their blocks have been read -> these, and the first one's index.
        self._found: dict[Sequence, tuple[BlockReading, int]] = {}
        # Sequences that fail -> why.
        self._broken: dict[Sequence, str] = {}

    # ---- blocks that come --------------------------------------------------------------------------------------------

    def waits(self, sequence: Sequence, num_hit: int) -> bool:
        """True if a sequence with a hit of `num_hit` blocks must be postponed until `ready` gives it."""
        if not self._store.reads or sequence in self._found or not sequence.may_hit:
            return False
        if self._num_asked(sequence) <= num_hit:
            return False
        if self._crowd or not self._begin(sequence, num_hit):
            self._crowd.append(sequence)
        return True

    def crowded(self, sequence: Sequence) -> bool:
        """True if a sequence had better not be looked at yet: enough others wait, and some are being read for."""
        return len(self._crowd) >= _MOST_ASIDE and bool(self._reading) and sequence not in self._found

    def _num_asked(self, sequence: Sequence) -> int:
        """Blocks of its prompt that could come; at least the last known token is left to compute."""
        return min(sequence.num_prompt, len(sequence.token_ids) - 1) // self._size

    def _begin(self, sequence: Sequence, num_hit: int) -> bool:
        last = self._num_asked(sequence)
        reading = self._store.read(sequence.request, num_hit, extend_keys(sequence, last, self._size)[num_hit:last])
        if reading is None:
            return False
        self._reading[sequence] = reading, num_hit, time.monotonic()
        return True

    def ready(self, find_hit: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Those that need not wait any longer."""
        now = time.monotonic()
        for sequence, (reading, first, begun_s) in list(self._reading.items()):
            if reading.ended or now - begun_s > PATIENCE_S:
                del self._reading[sequence]
                self._found[sequence] = reading, first
                yield sequence
        while self._crowd:
            sequence = self._crowd[0]
            if sequence.status is Status.WAITING and not self._begin(sequence, find_hit(sequence)):
                break
            self._crowd.popleft()

    def wait(self, seconds: float) -> bool:
        """Wait until something was read, so many seconds at most; False if nothing is."""
        if not self._reading:
            return False
        if not any(reading.ended for reading, _, _ in self._reading.values()):
            self._store.wait(seconds)
        return True

    def reach(self, sequence: Sequence, num_hit: int) -> int:
        """Blocks at the head of a sequence that are on the device (the first `num_hit`) or have been read."""
        if sequence not in self._found:
            return num_hit
        reading, first = self._found[sequence]
        if first > num_hit or not reading.ended:
            return num_hit
        return max(num_hit, first + len(reading.blocks))

    def take(self, sequence: Sequence, num_hit: int, blocks: tuple[tuple[int, ...], ...]) -> BlockLoad | None:
        """What fills the `blocks` of a sequence that is admitted, from index `num_hit` on; None if there are none.

        The sequence may ask again after a preemption.
        """
        if sequence not in self._found:
            return None
        reading, first = self._found.pop(sequence)
        if reading.ended and reading.broken and self._store.fails:
            self._broken[sequence] = reading.broken
        self._store.forget(reading)
        count = len(blocks[0]) if blocks else 0
        if not count:
            return None
        start = num_hit - first
        return BlockLoad(blocks, tuple(reading.blocks[start : start + count]))

    def void(self) -> None:
        """What was read is worthless, such as after a change of the weights."""
        for sequence, (reading, first, begun_s) in self._reading.items():
            self._store.forget(reading)
            self._reading[sequence] = _Nothing(), first, begun_s
        for sequence, (reading, first) in self._found.items():
            self._store.forget(reading)
            self._found[sequence] = _Nothing(), first

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        for held in (self._reading.pop(sequence, None), self._found.pop(sequence, None)):
            if held is not None:
                self._store.forget(held[0])
        self._broken.pop(sequence, None)

    def failures(self, sequences: Ordered[Sequence], plan: StepPlan) -> dict[int, str]:
        """Row -> why its sequence fails although its step has not."""
        if not self._broken:
            return {}
        pairs = zip(plan.slices, sequences, strict=True)
        return {piece.row: self._broken[sequence] for piece, sequence in pairs if sequence in self._broken}

    # ---- blocks that go ----------------------------------------------------------------------------------------------

    def keep(self, sequence: Sequence, start: int, stop: int) -> BlockKeep | None:
        """The blocks of the prompt that a slice completes and that are to be kept; None if there are none."""
        first, last = max(start // self._size, sequence.num_kept), min(stop, sequence.num_prompt) // self._size
        if last <= first or not self._store.writes or not self._store.has_room:
            return None
        extend_keys(sequence, last, self._size)
        sequence.num_kept = last
        return BlockKeep(sequence.row, first, tuple([tuple(table[first:last]) for table in sequence.tables]))

    def take_in(self, sequences: Ordered[Sequence], plan: StepPlan, result: StepResult) -> None:
        """Hand out what a step has brought, unless its sequence has failed."""
        if not plan.keep:
            return
        by_row = {piece.row: sequence for piece, sequence in zip(plan.slices, sequences, strict=True)}
        for row, first, blocks in plan.keep:
            parts, sequence = result.kept.get(row), by_row[row]
            # One that has ended may have failed in an earlier step, on which this one has built.
            if parts is not None and row not in result.failed and sequence.status is not Status.FINISHED:
                self._store.keep(sequence.block_keys[first : first + len(blocks[0])], parts)

    def drop(self, sequence: Sequence) -> None:
        """A sequence has failed: what was kept of it may be broken."""
        if self._store.writes:
            self._store.drop(sequence.block_keys[: sequence.num_prompt // self._size])

    def check(self, waiting: Ordered[Sequence]) -> None:
        """Assert that nothing is held for sequences that do not wait."""
        assert self._reading.keys() | self._found.keys() <= set(waiting), "blocks are held for nobody"
        assert not self._reading.keys() & self._found.keys(), "a sequence has blocks and waits for them"
