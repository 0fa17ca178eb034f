"""Latent attention: a latent and a rotary key of every position, as one row of numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from beheld.attention.backend import GroupMetadata, LayerCache, LayerLatent
from beheld.core.config import EngineConfig
from beheld.runner.cache.full import FullCache
from beheld.runner.cache.paged import zeros


class LatentCache(FullCache):
    """See TableCache."""

    def layer(self, num_blocks: int, config: EngineConfig, device: torch.device) -> LayerCache:
        """What one layer holds."""
        shape = (num_blocks, config.block_size, self.spec.head_dim)
        return LayerLatent(zeros(shape, getattr(torch, config.kv_dtype), device), self.spec.value_dim, self.index)

    def metadata(self, slots_T: Tensor, tables_BN: Tensor, both_ways: str, *, early: bool) -> GroupMetadata:
        """Kernels of latents prepare nothing before their first layer."""
        return replace(super().metadata(slots_T, tables_BN, both_ways, early=early), kv_heads=None)
