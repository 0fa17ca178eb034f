"""The waiting queue: smallest order first, so a preempted sequence comes before those that arrived later."""

from __future__ import annotations

import heapq

from beheld.scheduler.sequence import Sequence, Status


class WaitingQueue:
    """Sequences that wait for a row and blocks, sorted by `Sequence.order`.

    A sequence that ends while it waits is not searched for: it is subtracted from the count at once and skipped when it
    reaches the top. All ended ones are removed when they outnumber the others.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Sequence]] = []
        # In the order in which they were set aside.
        self._aside: dict[Sequence, None] = {}
        self._num_waiting = 0

    def push(self, sequence: Sequence) -> None:
        """Queue a waiting sequence."""
        assert sequence.status is Status.WAITING
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._num_waiting += 1

    def peek(self) -> Sequence | None:
        """The next sequence; None if none waits."""
        heap = self._heap
        while heap and heap[0][1].status is not Status.WAITING:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        """Remove and return the next sequence."""
        sequence = self.peek()
        assert sequence is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._num_waiting -= 1
        return sequence

    def set_aside(self) -> None:
        """The next sequence lets others pass until `recall`."""
        sequence = self.peek()
        assert sequence is not None, "no sequence to set aside"
        heapq.heappop(self._heap)
        self._aside[sequence] = None

    def recall(self) -> None:
        """Return the sequences set aside to their places."""
        for sequence in self._aside:
            heapq.heappush(self._heap, (sequence.order, sequence))
        self._aside.clear()

    @property
    def num_aside(self) -> int:
        """Number of sequences set aside."""
        return len(self._aside)

    def discard(self, sequence: Sequence) -> None:
        """Forget a waiting sequence that has ended; its status is FINISHED already."""
        assert sequence.status is Status.FINISHED
        self._num_waiting -= 1
        self._aside.pop(sequence, None)
        if len(self._heap) > 2 * self._num_waiting + 16:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return self._num_waiting

    def check(self) -> None:
        """Assert that the count and the heap agree."""
        living = [entry[1] for entry in self._heap if entry[1].status is Status.WAITING]
        living += self._aside
        assert len(living) == self._num_waiting, "the queue lost count"
        assert len(set(map(id, living))) == len(living), "a sequence waits twice"
