"""The cache of processed media, bounded by bytes, with a shortcut from undecoded bytes to content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beheld.core.media import MediaItem
from beheld.utils.lru import LRU

# An alias takes some hundred bytes, so this many are negligible.
_ALIAS_BYTES = 16 << 20
_ALIAS_SIZE = 1024


@dataclass(frozen=True, eq=False)
class Content:
    """A decoded input's digest and facts, without its pixels."""

    digest: bytes
    given: Mapping[str, Any]
    lost: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Processed:
    """A processed item, its receipt's facts, and what processing lost."""

    item: MediaItem
    used: Mapping[str, Any]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class CacheStats:
    """Counters of the processed-media cache."""

    items: int
    num_bytes: int
    max_bytes: int
    hits: int
    misses: int
    evictions: int


class MediaCache:
    """Processed items by digest; the least recently used are dropped first. Safe to use from several threads.

    Known content need not be decoded to find its item: `aliases` map the digest of undecoded bytes (or of an image in
    an unusual mode) to the digest of the content.
    """

    def __init__(self, max_bytes: int) -> None:
        self._items: LRU[bytes, Processed] = LRU(max_bytes)
        self._aliases: LRU[bytes, Content] = LRU(_ALIAS_BYTES if max_bytes else 0)

    def content(self, source: bytes) -> Content | None:
        """Return the facts of the input with this source digest."""
        return self._aliases.get(source)

    def remember(self, source: bytes, content: Content) -> None:
        """Record what an input was decoded to."""
        self._aliases.put(source, content, _ALIAS_SIZE)

    def get(self, digest: bytes) -> Processed | None:
        """Return the processed item, or None."""
        return self._items.get(digest)

    def put(self, processed: Processed) -> None:
        """Store a processed item."""
        self._items.put(processed.item.digest, processed, processed.item.feature_bytes + _ALIAS_SIZE)

    def clear(self) -> None:
        """Drop everything."""
        self._items.clear()
        self._aliases.clear()

    def stats(self) -> CacheStats:
        """Return the counters since the start."""
        counters = self._items.stats
        return CacheStats(
            len(self._items),
            self._items.num_bytes,
            self._items.max_bytes,
            counters.hits,
            counters.misses,
            counters.evictions,
        )
