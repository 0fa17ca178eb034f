"""What the stages of a pipeline send each other around a pass.

A stage gets hidden states of the one before it; the last stage sends the tokens that it sampled to all others, which
read them when a later step needs them. Each message belongs to one step, and each stage sends and reads those of all
its steps, also of a step in which it fails: otherwise it would read one step's numbers as another's.

Shapes: T tokens of a step, W numbers of an embedding with its extra columns, B sequences that sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from beheld.core.errors import EngineDeadError, StatesLostError, StepError, first_line
from beheld.core.plan import EncodeItem
from beheld.parallel.group import RankGroup

# How a stage has left a step: states were lost in an earlier attempt, it has failed, it sends hidden states, or it has
# kept what it computed in an earlier attempt.
_LOST, _FAILED, _DONE, _HELD = -2, -1, 1, 2
# Numbers of a header: the step, the outcome, which items were lost (a bit each), bytes of the embeddings that follow,
# how many dimensions the hidden states have, and their sizes.
_HEADER = 12
# Of the items' bits, which a signed number of 64 bits holds.
_LAST_BIT = 61
# Works that are kept until they are surely done.
_KEPT = 8


class Pipeline:
    """One stage's end of the pipeline.

    Args:
        group: of the stages, whose ranks are the stages in order.
        sends_embeds: whether later layers read the embeddings, too.
    """

    def __init__(self, group: RankGroup, device: torch.device, dtype: torch.dtype, *, sends_embeds: bool) -> None:
        self._group, self._device, self._dtype = group, device, dtype
        self._sends_embeds = sends_embeds
        group.open_lines(device)
        self.first, self.last = group.rank == 0, group.rank == group.size - 1
        # Sampled tokens that were not read yet: the rows that sample, and how many.
        self._unread: deque[tuple[frozenset[int], int]] = deque()
        # Of the present step: whether the header of the stage before is here and this one's is sent, the bytes of
        # tensors that are still to be received, and how many tokens the last stage is still to send.
        self._step = 0
        self._heard = self._sent = True
        self._coming: deque[int] = deque()
        self._owes = 0

    @contextmanager
    def step(self, number: int, rows: Iterable[int], count: int) -> Iterator[None]:
        """Send and read, within the block or at its end, each message of a step in which these rows sample.

        Args:
            number: the plan's.
            count: how many tokens the last stage sends.

        Raises:
            EngineDeadError: messages of the step remain.
        """
        self._step, self._heard, self._sent, self._owes = number, self.first, self.last, count if self.last else 0
        outcome = _FAILED
        try:
            yield
        except StatesLostError:
            outcome = _LOST
            raise
        finally:
            self._make_up(outcome)
            if not self.last and count:
                self._unread.append((frozenset(rows), count))

    def _make_up(self, outcome: int) -> None:
        """Send and read what the step lacks because it has failed."""
        if self._group.broken:
            return
        try:
            if not self._sent:
                self._tell(outcome)
            if not self._heard:
                self._hear()
            self._drop()
            self.pay(None, None)
        except Exception as error:
            # Otherwise the step's own error is raised: ranks that are gone are noticed elsewhere.
            if not self._group.broken:
                raise EngineDeadError(
                    f"The stages of the pipeline are out of step ({first_line(error)}).", "Restart the engine."
                ) from error

    def skip(self) -> None:
        """Take part in a step whose result this stage has kept.

        Raises:
            StepError, StatesLostError: see `receive`.
        """
        if not self.first:
            self._check(self._hear()[0])
            self._drop()
        if not self.last:
            self._tell(_HELD)

    def send(self, hidden: Tensor, embeds_TW: Tensor, lost: int) -> None:
        """Send a pass's hidden states to the next stage; `lost` has a bit for each item that was lost."""
        hidden, embeds_TW = hidden.contiguous(), embeds_TW.contiguous()
        self._tell(_DONE, lost, embeds_TW.nbytes if self._sends_embeds else 0, tuple(hidden.shape))
        self._group.send(hidden, self._group.rank + 1)
        if self._sends_embeds:
            self._group.send(embeds_TW, self._group.rank + 1)

    def _tell(self, outcome: int, lost: int = 0, num_bytes: int = 0, shape: Sequence[int] = ()) -> None:
        header = [self._step, outcome, lost, num_bytes, len(shape), *shape]
        self._sent = True
        self._group.send_host(torch.tensor(header + [0] * (_HEADER - len(header))), self._group.rank + 1)

    def receive(self, embeds_TW: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the pass's hidden states, the embeddings, and the items that were lost.

        Args:
            embeds_TW: of this stage's own making, used if none are sent.

        Raises:
            StepError: an earlier stage has failed.
            StatesLostError: an earlier stage cannot compute this step again.
        """
        outcome, lost, sizes = self._hear()
        self._check(outcome)
        if outcome == _HELD:
            raise StatesLostError("A step failed after an earlier stage had changed this sequence's states.")
        hidden = torch.empty(sizes, dtype=self._dtype, device=self._device)
        self._take(hidden)
        if self._sends_embeds:
            embeds_TW = torch.empty_like(embeds_TW)
            self._take(embeds_TW)
        return hidden, embeds_TW, lost

    def _hear(self) -> tuple[int, int, list[int]]:
        """Return how the stage before has left the step, which items were lost, and the hidden states' sizes."""
        number, outcome, lost, num_bytes, dims, *sizes = self._group.receive_host(_HEADER, self._group.rank - 1)
        self._heard = True
        if number != self._step:
            raise EngineDeadError(f"A stage got step {number} in step {self._step}.", "Restart the engine.")
        if outcome == _DONE:
            self._coming.append(prod(sizes[:dims]) * self._dtype.itemsize)
        if num_bytes:
            self._coming.append(num_bytes)
        return outcome, lost, sizes[:dims]

    @staticmethod
    def _check(outcome: int) -> None:
        if outcome == _FAILED:
            raise StepError("An earlier stage of the pipeline has failed.", "The log of that rank says why.")
        if outcome == _LOST:
            raise StatesLostError("A step failed after an earlier stage had changed this sequence's states.")

    def _take(self, x: Tensor) -> None:
        self._coming.popleft()
        self._group.receive(x, self._group.rank - 1)

    def _drop(self) -> None:
        """Receive the tensors that are still to come, and forget them."""
        while self._coming:
            self._take(torch.empty(self._coming[0], dtype=torch.uint8, device=self._device))

    def pay(self, places_B: Tensor | None, ids_B: Tensor | None) -> None:
        """Send what was sampled, and where in Rows.newest_P it goes, to all other stages; zeros if sampling failed."""
        if not self._owes:
            return
        if places_B is None or ids_B is None:
            both_2B = torch.zeros((2, self._owes), dtype=torch.int64, device=self._device)
            both_2B[0] = -1
        else:
            both_2B = torch.stack([places_B, ids_B])
        self._owes = 0
        for stage in range(self._group.size - 1):
            self._group.send(both_2B, stage)

    def settle(self, rows: Iterable[int], newest_P: Tensor) -> None:
        """Receive the tokens of unread passes, up to the last pass that had any of these rows."""
        wanted = set(rows)
        needed = max((at for at, (own, _) in enumerate(self._unread, 1) if own & wanted), default=0)
        for _ in range(max(needed, len(self._unread) - _KEPT)):
            _, count = self._unread.popleft()
            both_2B = torch.empty((2, count), dtype=torch.int64, device=self._device)
            self._group.receive(both_2B, self._group.size - 1)
            if int(both_2B[0, 0]) >= 0:
                newest_P.index_copy_(0, both_2B[0], both_2B[1])


def bits_of(lost: Sequence[bytes], items: Sequence[EncodeItem]) -> int:
    """Return a bit for each item whose digest was lost; the last one is for all items from its place on."""
    return sum({1 << min(place, _LAST_BIT) for place, item in enumerate(items) if item.digest in lost})


def lost_of(bits: int, items: Sequence[EncodeItem]) -> tuple[bytes, ...]:
    """Return the digests of those items."""
    return tuple(item.digest for place, item in enumerate(items) if bits >> min(place, _LAST_BIT) & 1)
