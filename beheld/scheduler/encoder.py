"""Which embeddings and states live on the device, by digest, within a fixed number of them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from beheld.core.media import MediaItem


class EncoderBudget:
    """Counts embeddings, or states of a cross group, on the device.

    An item that some sequence has computed in part, or that the step being planned needs, is held and stays. The rest
    stays until its room is wanted; the least recently used goes first, and is told to the device by `take_forgotten`.

    Of items with embeddings, a sequence holds at most one between steps, the one whose place it has computed in part,
    and can always go on with it; of items with states it holds all or none. So nobody waits for room while keeping
    others from theirs, and waiting for room always ends.
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

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def is_held(self, digest: bytes) -> bool:
        """True if it may not be dropped."""
        return digest in self._holders

    def has_room(self, num_embeds: int) -> bool:
        """True if `num_embeds` more can be held, idle ones being dropped where needed."""
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
        """One holder less. The last one leaves the item idle, now the most recently used."""
        left = self._holders[digest] - 1
        if left:
            self._holders[digest] = left
            return
        del self._holders[digest]
        self._num_held -= self._sizes[digest]
        self._idle[digest] = None

    def lose(self, digest: bytes) -> None:
        """The device does not have it after all; its holders, if any, have let go or no longer count."""
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
        """Tell of these once more: it is not known whether the device has dropped them."""
        self._forgotten.extend(digests)

    def check(self, held: Iterable[bytes]) -> None:
        """Assert every invariant; `held` lists, for each sequence that holds an item, its digest."""
        assert Counter(held) == Counter(self._holders), "embeddings: holders disagree with the sequences"
        assert self._num_used == sum(self._sizes.values()) <= self.max_embeds, "embeddings: wrong number in use"
        assert self._num_held == sum(self._sizes[d] for d in self._holders), "embeddings: wrong number held"
        assert self._holders.keys() | self._idle.keys() == self._sizes.keys(), "embeddings: neither held nor idle"
        assert not self._holders.keys() & self._idle.keys(), "embeddings: held and idle"
