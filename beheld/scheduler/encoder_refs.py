"""Which items' embeddings and states each sequence holds on the device, and for how long.

Embeddings are merged into the positions of their span, so a sequence holds them while it has computed that span in
part. Every position attends to states, so a sequence holds the states of all its items from admission until it leaves
the device. It is not admitted before there is room for all of them, so a running sequence never waits for states.
"""

from __future__ import annotations

from collections.abc import Iterable

from beheld.core.media import MediaItem
from beheld.scheduler.encoder_budget import EncoderBudget
from beheld.scheduler.sequence import EmbedRange, Sequence
from beheld.scheduler.step_builder import StepBuilder


class EncoderRefs:
    """Holds items in the encoder budget for sequences."""

    def __init__(self, budget: EncoderBudget) -> None:
        self._budget = budget

    def can_admit(self, sequence: Sequence, step: StepBuilder) -> bool:
        """True if there is room for all states of a waiting sequence; else no later one may take any in this step."""
        wanted = [item for item in sequence.state_items if not self._budget.is_held(item.digest)]
        if not wanted:
            return True
        if not step.encoder_closed and self._budget.has_room(sum(item.num_states for item in wanted)):
            return True
        step.encoder_closed = True
        return False

    def admit(self, sequence: Sequence, step: StepBuilder) -> None:
        """Hold all states of a sequence that has just been admitted; items that are not on the device are encoded."""
        # Items on the device are held first, so that none of them is dropped to make room for the others.
        for item in sorted(sequence.state_items, key=lambda item: item.digest not in self._budget):
            if self._budget.hold(item):
                step.encode_item(item)
            sequence.states = (*sequence.states, item)

    def limit(self, sequence: Sequence, start: int, stop: int, step: StepBuilder) -> int:
        """How far the slice can go, up to `stop`, before it needs embeddings that there is no room for."""
        planned: set[bytes] = set()
        num_planned = 0
        for taken in _touched(sequence, start, stop):
            digest = taken.item.digest
            if digest in planned or self._budget.is_held(digest):
                continue
            if step.encoder_closed or not self._budget.has_room(num_planned + taken.item.num_embeds):
                step.encoder_closed = True
                return taken.next_embed(start)
            planned.add(digest)
            num_planned += taken.item.num_embeds
        return stop

    def hold(self, sequence: Sequence, start: int, stop: int, step: StepBuilder) -> None:
        """Hold the slice's embeddings until the step ends, and longer those of a range that it leaves unfinished."""
        touched = list(_touched(sequence, start, stop))
        items = {taken.item.digest: taken.item for taken in touched}
        before = sequence.held
        if before is not None:
            items.pop(before.digest, None)
        # Items on the device are held first, so that none of them is dropped to make room for the others.
        for item in sorted(items.values(), key=lambda item: item.digest not in self._budget):
            if self._budget.hold(item):
                step.encode_item(item)
        mine = [*items] if before is None else [before.digest, *items]
        after = sequence.held
        if touched:
            after = touched[-1].item if touched[-1].last > stop else None
        sequence.held = after
        step.used.extend(digest for digest in mine if after is None or digest != after.digest)

    def leave(self, sequence: Sequence) -> None:
        """Release all that a sequence holds."""
        for item in self._held(sequence):
            self._budget.release(item.digest)
        sequence.held = None
        sequence.states = ()

    def lose(self, digest: bytes, running: Iterable[Sequence]) -> None:
        """The device does not have this item."""
        self._budget.lose(digest)
        for sequence in running:
            if sequence.held is not None and sequence.held.digest == digest:
                sequence.held = None
            if sequence.states:
                sequence.states = tuple(item for item in sequence.states if item.digest != digest)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert every invariant; only running sequences hold items."""
        self._budget.check(item.digest for sequence in running for item in self._held(sequence))

    def _held(self, sequence: Sequence) -> tuple[MediaItem, ...]:
        return sequence.states if sequence.held is None else (*sequence.states, sequence.held)


def _touched(sequence: Sequence, start: int, stop: int) -> list[EmbedRange]:
    """The ranges of which the slice takes embeddings, in order."""
    found: list[EmbedRange] = []
    for index in range(sequence.next_range, len(sequence.embed_ranges)):
        taken = sequence.embed_ranges[index]
        if taken.first >= stop:
            break
        if taken.needed(start, stop):
            found.append(taken)
    return found
