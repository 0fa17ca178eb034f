"""Which embeddings and states are on the device, by digest, within a fixed number of them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from beheld.core.media import MediaItem


class EncoderBudget:
    """Counts embeddings, and states of items, on the device.

    An item is held, and stays, while a sequence has computed it in part or the step being planned needs it. All other
    items are idle: they stay until their room is needed. The least recently used is dropped first, and
    `take_forgotten` says so to the device.

    Between steps a sequence holds at most one item with embeddings, the one that it has computed in part, and can
    always continue with it. Of items with states it holds all or none. So no sequence that waits for room keeps room
    from others, and waiting for room always ends.
    """

    def __init__(self, max_embeds: int) -> None:
        self.max_embeds = max_embeds
        self.num_encoded = 0
        self.num_reused = 0
        self._sizes: dict[bytes, int] = {}
        self._holders: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._num_used = 0
        self._num_held = 0
        self._forgotten: list[bytes] = []

    @property
    def num_used(self) -> int:
        """Embeddings on the device."""
        return self._num_used

    @property
    def known(self) -> tuple[bytes, ...]:
        """The digests of the items on the device."""
        return tuple(self._sizes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def is_held(self, digest: bytes) -> bool:
        """True if it may not be dropped."""
        return digest in self._holders

    def has_room(self, num_embeds: int) -> bool:
        """True if `num_embeds` more can be held once idle ones are dropped."""
        return self._num_held + num_embeds <= self.max_embeds

    def hold(self, item: MediaItem) -> bool:
        """Add a holder; True if the item is not on the device and must be encoded in this step."""
        digest = item.digest
        if digest in self._holders:
            self._holders[digest] += 1
            self.num_reused += 1
            return False
        self._holders[digest] = 1
        self._num_held += item.num_kept
        if digest in self._sizes:
            del self._idle[digest]
            self.num_reused += 1
            return False
        self._sizes[digest] = item.num_kept
        self._num_used += item.num_kept
        self.num_encoded += 1
        while self._num_used > self.max_embeds:
            self._drop(next(iter(self._idle)))
        return True

    def _drop(self, digest: bytes) -> None:
        del self._idle[digest]
        self._num_used -= self._sizes.pop(digest)
        self._forgotten.append(digest)

    def release(self, digest: bytes) -> None:
        """Remove a holder. Without any, the item is idle, and the most recently used."""
        left = self._holders[digest] - 1
        if left:
            self._holders[digest] = left
            return
        del self._holders[digest]
        self._num_held -= self._sizes[digest]
        self._idle[digest] = None

    def drop_idle(self) -> None:
        """Drop all items that nobody holds."""
        for digest in list(self._idle):
            self._drop(digest)

    def lose(self, digest: bytes) -> None:
        """The device does not have the item; its holders, if it has any, are removed too."""
        if digest not in self._sizes:
            return
        size = self._sizes.pop(digest)
        self._num_used -= size
        if self._holders.pop(digest, 0):
            self._num_held -= size
        else:
            del self._idle[digest]

    def take_forgotten(self) -> tuple[bytes, ...]:
        """Digests dropped since the last call: the device must forget them before it encodes."""
        forgotten = tuple(self._forgotten)
        self._forgotten.clear()
        return forgotten

    def forget_again(self, digests: Iterable[bytes]) -> None:
        """Report these again: the device may not have dropped them."""
        self._forgotten.extend(digests)

    def check(self, held: Iterable[bytes]) -> None:
        """Assert every invariant; `held` lists, for each sequence that holds an item, its digest."""
        assert Counter(held) == Counter(self._holders), "embeddings: holders disagree with the sequences"
        assert self._num_used == sum(self._sizes.values()) <= self.max_embeds, "embeddings: wrong number in use"
        assert self._num_held == sum(self._sizes[d] for d in self._holders), "embeddings: wrong number held"
        assert self._holders.keys() | self._idle.keys() == self._sizes.keys(), "embeddings: neither held nor idle"
        assert not self._holders.keys() & self._idle.keys(), "embeddings: held and idle"
