"""Sliding-window attention: keys and values of the last positions."""

from __future__ import annotations

from beheld.core.config import EngineConfig
from beheld.runner.cache.paged import PagedCache


class SlidingCache(PagedCache):
    """See TableCache."""

    def kept_positions(self, config: EngineConfig) -> int:
        """The window, a step, and what is left of a block."""
        assert self.spec.window is not None
        return min(config.max_model_len, self.spec.window + config.max_num_batched_tokens + config.block_size)

    def chosen_blocks(self, wanted: int, config: EngineConfig) -> int:
        """No more than windows can use."""
        return min(wanted, self.most_blocks(config))
