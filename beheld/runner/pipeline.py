"""What the stages of a pipeline send each other around a pass.

A stage gets hidden states of the one before it; the last stage sends the tokens that it sampled to all others, which
read them when a later step needs them. Each message belongs to one pass, so all stages send and read the same number.

Shapes: T tokens of a step, W numbers of an embedding with its extra columns, B sequences that sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from beheld.core.errors import StepError
from beheld.core.plan import EncodeItem
from beheld.parallel.group import RankGroup

_FAILED, _DONE = -1, 1
# Of a header: the outcome, which items were lost (a bit each), the number of dimensions, and the sizes.
_HEADER = 10
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
        self.first, self.last = group.rank == 0, group.rank == group.size - 1
        # Sampled tokens that were not read yet: the rows that sample, and how many.
        self._unread: deque[tuple[frozenset[int], int]] = deque()
        self._owes = 0

    def send(self, hidden: Tensor, embeds_TW: Tensor, lost: int) -> None:
        """Send a pass's hidden states to the next stage; `lost` has a bit for each item that was lost."""
        shape = tuple(hidden.shape)
        self._tell(_DONE, lost, shape)
        self._group.send(hidden, self._group.rank + 1)
        if self._sends_embeds:
            self._group.send(embeds_TW, self._group.rank + 1)

    def fail(self) -> None:
        """Tell the next stage that this one has failed in a pass."""
        if not self.last:
            self._tell(_FAILED, 0, ())

    def _tell(self, outcome: int, lost: int, shape: Sequence[int]) -> None:
        header = [outcome, lost, len(shape), *shape]
        self._group.send_host(torch.tensor(header + [0] * (_HEADER - len(header))), self._group.rank + 1)

    def receive(self, embeds_TW: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the pass's hidden states, the embeddings, and the items that were lost.

        Args:
            embeds_TW: of this stage's own making, used if none are sent.

        Raises:
            StepError: an earlier stage has failed.
        """
        source = self._group.rank - 1
        outcome, lost, dims, *sizes = self._group.receive_host(_HEADER, source)
        if outcome == _FAILED:
            raise StepError("An earlier stage of the pipeline has failed.", "The log of that rank says why.")
        hidden = torch.empty(sizes[:dims], dtype=self._dtype, device=self._device)
        self._group.receive(hidden, source)
        if self._sends_embeds:
            embeds_TW = torch.empty_like(embeds_TW)
            self._group.receive(embeds_TW, source)
        return hidden, embeds_TW, lost

    def owe(self, count: int) -> None:
        """Note that the last stage is to send so many tokens of this pass."""
        self._owes = count

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

    def expect(self, rows: Iterable[int], count: int) -> None:
        """Note on another stage that tokens of this pass will come."""
        if count:
            self._unread.append((frozenset(rows), count))

    def settle(self, rows: Iterable[int], newest_P: Tensor) -> None:
        """Read the tokens that came of earlier passes with any of these rows, and of all passes before those."""
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
