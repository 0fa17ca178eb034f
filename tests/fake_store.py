"""A store of blocks outside of the engine, in memory: what is read comes when a test says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from beheld.core.request import Request


class FakeReading:
    """See BlockReading."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.blocks: list[np.ndarray] = []
        self.broken = ""
        self.ended = False
        self.held = True


class FakeStore:
    """See PrefixStore.

    Attributes:
        held: key -> the block's bytes.
        bad: keys of blocks that cannot be used.
        most: readings that may be held at a time.
        at_once: whether `wait` ends all readings.
    """

    def __init__(self, *, most: int = 1000, fails: bool = False) -> None:
        self.reads = self.writes = True
        self.fails = fails
        self.has_room = True
        self.held: dict[bytes, np.ndarray] = {}
        self.bad: set[bytes] = set()
        self.most = most
        self.at_once = True
        self.readings: list[FakeReading] = []

    def read(self, request: Request, first: int, keys: Sequence[bytes]) -> FakeReading | None:
        self.readings = [reading for reading in self.readings if reading.held]
        if len(self.readings) >= self.most:
            return None
        self.readings.append(FakeReading(tuple(keys)))
        return self.readings[-1]

    def finish(self) -> None:
        """All that is being read is there now."""
        for reading in self.readings:
            if reading.ended:
                continue
            for key in reading.keys:
                if key in self.bad:
                    reading.broken = "a bad block"
                    self.bad.discard(key)
                    self.held.pop(key, None)
                if key not in self.held:
                    break
                reading.blocks.append(self.held[key])
            reading.ended = True

    def forget(self, reading: FakeReading) -> None:
        reading.held = False

    def wait(self, seconds: float) -> None:
        if self.at_once:
            self.finish()

    def keep(self, keys: Sequence[bytes], parts: Sequence[np.ndarray]) -> None:
        for index, key in enumerate(keys):
            self.held[key] = np.concatenate([part[index] for part in parts])

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)
