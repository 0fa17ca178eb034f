"""The waiting queue: one line per client.

In a line the smallest order is first, so a preempted sequence comes before those that arrived later.
"""

from __future__ import annotations

import heapq
from collections.abc import KeysView
from dataclasses import dataclass, field

from beheld.scheduler.sequence import Sequence, Status


@dataclass(slots=True)
class _Line:
    """The waiting sequences of one client.

    Attributes:
        heap: those that are not set aside, and some that have ended.
        num_waiting: how many wait, those set aside and those postponed included.
        num_tokens: of all their prompts, those postponed left out.
    """

    heap: list[tuple[tuple[int, float, int], Sequence]] = field(default_factory=list)
    num_waiting: int = 0
    num_tokens: int = 0


class WaitingQueue:
    """Sequences that wait for a row and blocks, by client and sorted by `Sequence.order`.

    A sequence that ends while it waits is not searched for: it is subtracted from the count at once and skipped when it
    reaches the top. All ended ones are removed when they outnumber the others.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        # In the order in which they were set aside.
        self._aside: dict[Sequence, None] = {}
        self._postponed: set[Sequence] = set()
        self._num_waiting = 0

    def push(self, sequence: Sequence) -> None:
        """Queue a waiting sequence."""
        assert sequence.status is Status.WAITING
        client = sequence.request.client
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line()
        heapq.heappush(line.heap, (sequence.order, sequence))
        line.num_waiting += 1
        line.num_tokens += sequence.num_prompt
        self._num_waiting += 1

    def peek(self, client: str) -> Sequence | None:
        """The client's next sequence; None if none waits."""
        line = self._lines.get(client)
        if line is None:
            return None
        heap = line.heap
        while heap and heap[0][1].status is not Status.WAITING:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self, client: str) -> Sequence:
        """Remove and return the client's next sequence."""
        sequence = self.peek(client)
        assert sequence is not None, "pop from an empty queue"
        heapq.heappop(self._lines[client].heap)
        self._leave(sequence)
        return sequence

    def set_aside(self, client: str) -> None:
        """The client's next sequence lets others pass until `recall`."""
        sequence = self.peek(client)
        assert sequence is not None, "no sequence to set aside"
        heapq.heappop(self._lines[client].heap)
        self._aside[sequence] = None

    def recall(self) -> None:
        """Return the sequences set aside to their places."""
        for sequence in self._aside:
            heapq.heappush(self._lines[sequence.request.client].heap, (sequence.order, sequence))
        self._aside.clear()

    def postpone(self, client: str) -> None:
        """The client's next sequence lets others pass until `resume`."""
        sequence = self.peek(client)
        assert sequence is not None, "no sequence to postpone"
        line = self._lines[client]
        heapq.heappop(line.heap)
        line.num_tokens -= sequence.num_prompt
        self._postponed.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Return a postponed sequence to its place, unless it has ended."""
        if sequence in self._postponed:
            self._postponed.remove(sequence)
            line = self._lines[sequence.request.client]
            heapq.heappush(line.heap, (sequence.order, sequence))
            line.num_tokens += sequence.num_prompt

    @property
    def num_aside(self) -> int:
        """Number of sequences set aside."""
        return len(self._aside)

    @property
    def clients_aside(self) -> list[str]:
        """Their clients, in the order in which the first of each was set aside."""
        return list(dict.fromkeys(sequence.request.client for sequence in self._aside))

    def discard(self, sequence: Sequence) -> None:
        """Forget a waiting sequence that has ended; its status is FINISHED already."""
        assert sequence.status is Status.FINISHED
        self._aside.pop(sequence, None)
        if sequence in self._postponed:
            self._postponed.remove(sequence)
            self._lines[sequence.request.client].num_tokens += sequence.num_prompt
        self._leave(sequence)
        line = self._lines.get(sequence.request.client)
        if line is not None and len(line.heap) > 2 * line.num_waiting + 16:
            line.heap = [entry for entry in line.heap if entry[1].status is Status.WAITING]
            heapq.heapify(line.heap)

    def _leave(self, sequence: Sequence) -> None:
        """The sequence waits no longer."""
        client = sequence.request.client
        line = self._lines[client]
        line.num_waiting -= 1
        line.num_tokens -= sequence.num_prompt
        self._num_waiting -= 1
        if not line.num_waiting:
            del self._lines[client]

    @property
    def clients(self) -> KeysView[str]:
        """Clients of which a sequence waits."""
        return self._lines.keys()

    def num_tokens(self, client: str) -> int:
        """Tokens of a client's waiting prompts, postponed ones excluded."""
        return self._lines[client].num_tokens

    def __len__(self) -> int:
        return self._num_waiting

    def check(self) -> None:
        """Assert that the counts and the heaps agree."""
        everybody: list[Sequence] = []
        for client, line in self._lines.items():
            living = [entry[1] for entry in line.heap if entry[1].status is Status.WAITING]
            living += [sequence for sequence in self._aside if sequence.request.client == client]
            postponed = [sequence for sequence in self._postponed if sequence.request.client == client]
            assert len(living) + len(postponed) == line.num_waiting > 0, "the queue lost count"
            assert sum(sequence.num_prompt for sequence in living) == line.num_tokens, "the queue lost count of tokens"
            assert all(sequence.request.client == client for sequence in living), "a sequence waits in another's line"
            everybody += living + postponed
        assert len(everybody) == self._num_waiting, "the queue lost count"
        assert len(set(map(id, everybody))) == len(everybody), "a sequence waits twice"
