"""Which of the fronts of one engine a process is: its share of what they have together, and its range of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from beheld.core.config import EngineConfig

# Numbers of one life of a front: more than it can have requests.
_NUMBERS = 1 << 40
# What front 0 spends on passing on a request of another front, as a part of what a front spends on its own (two H200,
# new images, 64 tokens streamed: 3.5 of 15.3 ms); and the least of its work that is left to it.
_RELAY, _LEAST = 0.23, 0.05


@dataclass(frozen=True)
class FrontPlace:
    """The place of a front.

    Attributes:
        number: which of them it is, from 0. Front 0 is the process that has the engine.
        count: how many there are.
        restarts: how often this one was started anew.
    """

    number: int = 0
    count: int = 1
    restarts: int = 0

    def share(self, total: int) -> int:
        """Its share of a limit: all shares together are the limit, but each is at least 1, unless that is 0."""
        return min(total, max(1, total // self.count + (self.number < total % self.count)))

    @property
    def weight(self) -> float:
        """What a connection counts for; 1 but at front 0, which also passes on what the others send."""
        return 1.0 if self.number else 1.0 / max(_LEAST, 1.0 - _RELAY * (self.count - 1))

    def numbers(self) -> Iterator[int]:
        """Numbers that no other front has, nor had this one in an earlier life."""
        return itertools.count(self.restarts * _NUMBERS * self.count + self.number, self.count)

    def config(self, config: EngineConfig) -> EngineConfig:
        """The configuration with this front's share of what prepares requests."""
        if self.count == 1:
            return config
        return replace(
            config,
            processor_cache_bytes=config.processor_cache_bytes // self.count,
            media_workers=self.share(config.media_workers),
            prepare_threads=self.share(config.prepare_threads),
        )


ALONE = FrontPlace()
"""The place of the only front."""
