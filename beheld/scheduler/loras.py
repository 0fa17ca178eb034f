"""Which LoRA adapters may run together: as many as the device has slots for, and no request waits for ever."""

from __future__ import annotations

from collections import Counter

from beheld.core.request import LoRARequest
from beheld.scheduler.queue import WaitingQueue
from beheld.scheduler.sequence import Sequence


class LoRAQuota:
    """Counts the adapters of running sequences.

    A sequence whose adapter finds no slot is set aside, and later sequences may pass it: those without an adapter
    always, those whose adapter has a slot already `patience` times. After that no more pass, slots become free, and the
    sequence that was set aside gets one.

    Args:
        max_loras: slots of the device.
        patience: how many sequences with adapters may pass one that waits for a slot.
    """

    def __init__(self, max_loras: int, patience: int) -> None:
        self._max_loras = max_loras
        self._patience = patience
        self._in_use: Counter[LoRARequest] = Counter()
        self._passed = 0
        self._changed = False

    def peek(self, queue: WaitingQueue, client: str) -> Sequence | None:
        """The client's next sequence that finds a slot or needs none, or None; those before it are set aside."""
        self.recall(queue)
        sequence = queue.peek(client)
        while sequence is not None and not self._finds_slot(sequence, queue):
            queue.set_aside(client)
            sequence = queue.peek(client)
        return sequence

    def recall(self, queue: WaitingQueue) -> None:
        """Return sequences set aside to their places if they may find a slot now."""
        if self._changed:
            # A slot may be free, or taken by an adapter that a sequence set aside waits for.
            queue.recall()
            self._changed = False

    def _finds_slot(self, sequence: Sequence, queue: WaitingQueue) -> bool:
        lora = sequence.request.lora
        if lora is None:
            return True
        if lora in self._in_use:
            return not queue.num_aside or self._passed < self._patience
        return len(self._in_use) < self._max_loras

    def enter(self, sequence: Sequence, queue: WaitingQueue) -> None:
        """The sequence begins to run."""
        lora = sequence.request.lora
        if lora is None:
            return
        if lora not in self._in_use:
            self._changed = True
            self._passed = 0
        elif queue.num_aside:
            self._passed += 1
        self._in_use[lora] += 1

    def leave(self, sequence: Sequence) -> None:
        """The sequence no longer runs."""
        lora = sequence.request.lora
        if lora is None:
            return
        self._in_use[lora] -= 1
        if not self._in_use[lora]:
            del self._in_use[lora]
            self._changed = True

    def check(self, running: list[Sequence]) -> None:
        """Assert that the counts are those of `running`."""
        assert self._in_use == Counter(s.request.lora for s in running if s.request.lora is not None)
        assert len(self._in_use) <= self._max_loras, "more adapters run than there are slots"
