"""Prompts that begin alike and arrive together compute what they share once.

A prefix can be shared once its blocks are registered, which is when the host has read the result of the step that
computed them. A sequence that is admitted before that would compute the same positions again. So it waits for the
sequence that computes them, its *owner*, and then takes them from the prefix cache:

    owner     | 0 .. 511 | 512 .. 1023 | ...          a running prefill
    waits     | 0 .. 511 |  own                       for the first 512 positions, not for the rest

An owner belongs to the same client and has no worse priority, so nobody waits for a sequence that is served later than
itself. It runs; when it no longer does, those that wait for it are free again.
"""

from __future__ import annotations

from collections.abc import Iterator

from beheld.scheduler.cache.prefix import extend_keys
from beheld.scheduler.sequence import Sequence, Status

MIN_SHARED = 128
"""Positions; to share fewer is not worth the two steps that a sequence waits."""


class SharedPrefills:
    """Which running sequences compute which blocks of prompts, and who waits for them."""

    def __init__(self, block_size: int, min_shared: int = MIN_SHARED) -> None:
        self._block_size = block_size
        self._min_blocks = -(-min_shared // block_size)
        # Block key -> the running sequence that computes the block, or has computed it.
        self._owners: dict[bytes, Sequence] = {}
        # Owner -> how many keys it announced.
        self._announced: dict[Sequence, int] = {}
        # Owner -> those that wait for it, and the number of blocks that each shares with it.
        self._waiting: dict[Sequence, list[tuple[Sequence, int]]] = {}

    def announce(self, sequence: Sequence) -> None:
        """A sequence that was just admitted is going to compute what it did not find in the prefix cache."""
        num_blocks = sequence.num_prompt // self._block_size
        if num_blocks - sequence.num_keyed < self._min_blocks:
            return
        for key in extend_keys(sequence, num_blocks, self._block_size)[:num_blocks]:
            self._owners.setdefault(key, sequence)
        self._announced[sequence] = num_blocks

    def forget(self, sequence: Sequence) -> None:
        """A sequence no longer runs."""
        for key in sequence.block_keys[: self._announced.pop(sequence, 0)]:
            if self._owners.get(key) is sequence:
                del self._owners[key]

    def waits(self, sequence: Sequence, num_hit: int) -> bool:
        """True if a waiting sequence with a hit of `num_hit` blocks had better wait for a running one; notes it."""
        last = (len(sequence.token_ids) - 1) // self._block_size
        if not self._owners or not sequence.may_hit or last - num_hit < self._min_blocks:
            return False
        keys = extend_keys(sequence, last, self._block_size)
        owner = self._owners.get(keys[num_hit + self._min_blocks - 1])
        if owner is None or owner.request.client != sequence.request.client or owner.order[0] > sequence.order[0]:
            return False
        shared = num_hit + self._min_blocks
        last = min(last, self._announced[owner])
        while shared < last and keys[shared] == owner.block_keys[shared]:
            shared += 1
        if shared - max(num_hit, owner.num_keyed) < self._min_blocks:
            # What is registered already and not found cannot be taken from there.
            return False
        self._waiting.setdefault(owner, []).append((sequence, shared))
        return True

    def ready(self) -> Iterator[Sequence]:
        """Those that need not wait any longer."""
        for owner, waiting in list(self._waiting.items()):
            if owner.status is not Status.RUNNING:
                del self._waiting[owner]
                yield from (sequence for sequence, _ in waiting)
                continue
            left = [(sequence, shared) for sequence, shared in waiting if shared > owner.num_keyed]
            if len(left) < len(waiting):
                yield from (sequence for sequence, shared in waiting if shared <= owner.num_keyed)
                if left:
                    self._waiting[owner] = left
                else:
                    del self._waiting[owner]

    def check(self, running: list[Sequence]) -> None:
        """Assert that only running sequences are owners."""
        assert set(self._announced) <= set(running), "a sequence that does not run announces blocks"
        assert set(self._owners.values()) <= set(self._announced)
