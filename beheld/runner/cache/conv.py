"""Short convolutions: the inputs of the last positions."""

from __future__ import annotations

import torch
from torch import Tensor

from beheld.attention.backend import GroupMetadata, LayerCache
from beheld.attention.conv import LayerInputs
from beheld.core.config import EngineConfig
from beheld.runner.cache.paged import zeros
from beheld.runner.cache.sliding import SlidingCache


class ConvCache(SlidingCache):
    """See TableCache."""

    def most_blocks(self, config: EngineConfig) -> int:
        """The last inputs of each row, those of a step, and as many for cached prefixes: they are large."""
        assert self.spec.window is not None
        kept = config.max_num_seqs * (1 + -(-self.spec.window // config.block_size))
        return 2 * (kept + -(-config.max_num_batched_tokens // config.block_size)) + 1

    def layer(self, num_blocks: int, config: EngineConfig, device: torch.device) -> LayerCache:
        """What one layer holds."""
        shape = (num_blocks, config.block_size, self.spec.num_kv_heads * self.spec.head_dim)
        return LayerInputs(zeros(shape, getattr(torch, config.kv_dtype), device), self.index)

    def metadata(self, slots_T: Tensor, tables_BN: Tensor, both_ways: str, *, early: bool) -> GroupMetadata:
        """A convolution prepares nothing early and looks nowhere ahead."""
        return GroupMetadata(slots_T, tables_BN, window=self.spec.window, ahead="never")
