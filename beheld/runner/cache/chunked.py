"""Chunked attention: keys and values of the last positions, of which a query sees those of its own chunk."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from beheld.attention.backend import GroupMetadata
from beheld.runner.cache.sliding import SlidingCache


class ChunkedCache(SlidingCache):
    """See TableCache."""

    def metadata(self, slots_T: Tensor, tables_BN: Tensor, both_ways: str, *, early: bool) -> GroupMetadata:
        """A window of the chunk's length, cut at the chunk's start."""
        return replace(super().metadata(slots_T, tables_BN, both_ways, early=early), chunk=self.spec.window)
