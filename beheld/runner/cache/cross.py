"""Cross attention: keys and values of media items, which the encoder cache keeps by digest."""

from __future__ import annotations

import torch

from beheld.attention.context import CrossContext
from beheld.attention.cross import CrossBackend, CrossMetadata, CrossRun
from beheld.core.config import EngineConfig, KVGroup
from beheld.models.adapter import ModelAdapter


class CrossCache:
    """See StateCache."""

    no_graph: str | None = "the states that they look at differ in number"
    captures_prefill = False

    def __init__(self, spec: KVGroup, index: int) -> None:
        self.spec = spec
        self.index = index
        self._index_by_layer = {layer: place for place, layer in enumerate(spec.layers)}

    def block_bytes(self, config: EngineConfig) -> int:
        """See DeviceCache."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        return self.spec.bytes_per_token(dtype.itemsize) * config.block_size

    def needed_blocks(self, config: EngineConfig) -> int:
        """Those of one item."""
        return min(-(-self.spec.num_states // config.block_size) + 1, self.most_blocks(config))

    def most_blocks(self, config: EngineConfig) -> int:
        """All states that the scheduler hands out."""
        return -(-config.max_encoder_tokens // config.block_size)

    def share_of(self, level: int, config: EngineConfig) -> int:
        """See DeviceCache."""
        return level

    def chosen_blocks(self, wanted: int, config: EngineConfig) -> int:
        """All that fit: `wanted` counts blocks of positions, which say nothing about items."""
        return self.most_blocks(config)

    def max_states(self, num_blocks: int, config: EngineConfig) -> int:
        """See StateCache."""
        return min(config.max_encoder_tokens, num_blocks * config.block_size)

    def context(self, backend: CrossBackend, found: CrossMetadata) -> CrossContext:
        """See StateCache."""
        return CrossContext(backend, found, self._index_by_layer)

    def blank(self, num_tokens: int, adapter: ModelAdapter) -> CrossMetadata:
        """See StateCache."""
        spec = self.spec
        shape = (len(spec.layers), 2, spec.num_states, spec.num_kv_heads, spec.head_dim)
        states = torch.zeros(shape, dtype=adapter.dtype, device=adapter.device).movedim(2, 0)
        return CrossMetadata((CrossRun(((0, num_tokens),), (states,)),), torch.ones(num_tokens, device=adapter.device))
