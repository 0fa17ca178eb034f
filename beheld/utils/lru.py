"""A thread-safe least-recently-used map with a limit in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass
class LRUStats:
    """Counters since the cache's creation."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class LRU(Generic[K, V]):
    """Holds values up to `max_bytes` in total and evicts the least recently used first.

    A value larger than the limit is not kept. With `max_bytes` 0 nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes >= 0
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.stats = LRUStats()
        self._lock = threading.Lock()
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.stats.misses += 1
                return None
            self._entries.move_to_end(key)
            self.stats.hits += 1
            return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep `value` of size `num_bytes` and evict the oldest until all fits."""
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.num_bytes -= old[1]
            if num_bytes > self.max_bytes:
                return
            self._entries[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                _, (_, dropped) = self._entries.popitem(last=False)
                self.num_bytes -= dropped
                self.stats.evictions += 1

    def clear(self) -> None:
        """Drop everything; the counters stay."""
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries
