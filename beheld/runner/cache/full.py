"""Full attention: keys and values of every position."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from beheld.attention.backend import GroupMetadata
from beheld.runner.cache.paged import PagedCache


class FullCache(PagedCache):
    """See TableCache."""

    def metadata(self, slots_T: Tensor, tables_BN: Tensor, both_ways: str, *, early: bool) -> GroupMetadata:
        """Where only windows are read both ways, full attention looks nowhere ahead."""
        made = super().metadata(slots_T, tables_BN, both_ways, early=early)
        return replace(made, ahead="never") if both_ways == "windowed media" else made
