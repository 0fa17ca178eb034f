"""What all groups have in common whose layers keep keys and values of positions in blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from beheld.attention import float8_kv
from beheld.attention.backend import GroupMetadata, LayerCache, LayerKey, LayerKV
from beheld.attention.float8_kv import Float8KV
from beheld.attention.rounded_kv import RoundedKV
from beheld.core.config import EngineConfig, KVGroup
from beheld.platform import pages
from beheld.platform.registry import platform_of

# ModelInfo.both_ways -> GroupMetadata.ahead, where it is not "ranges".
_AHEAD = {"joint": "joint", "whole media": "whole"}


class PagedCache:
    """See TableCache; as for full attention where a kind's own class says nothing else."""

    no_graph: str | None = None
    captures_prefill = True

    def __init__(self, spec: KVGroup, index: int) -> None:
        self.spec = spec
        self.index = index

    def kept_positions(self, config: EngineConfig) -> int:
        """Positions that one sequence of the greatest length holds at once."""
        return config.max_model_len

    def block_bytes(self, config: EngineConfig) -> int:
        """See DeviceCache."""
        return self.spec.bytes_per_token(*config.kv_bytes) * config.block_size

    def needed_blocks(self, config: EngineConfig) -> int:
        """See DeviceCache."""
        return min(self._blocks_of_one(config) + 1, self.most_blocks(config))

    def most_blocks(self, config: EngineConfig) -> int:
        """All rows full, as much again for cached prefixes, and the null block."""
        return 2 * config.max_num_seqs * self._blocks_of_one(config) + 1

    def share_of(self, level: int, config: EngineConfig) -> int:
        """See DeviceCache."""
        return level

    def chosen_blocks(self, wanted: int, config: EngineConfig) -> int:
        """See DeviceCache."""
        return wanted

    def _blocks_of_one(self, config: EngineConfig) -> int:
        return -(-self.kept_positions(config) // config.block_size)

    def allocate(self, num_blocks: int, config: EngineConfig, device: torch.device) -> dict[LayerKey, LayerCache]:
        """See TableCache."""
        layers: dict[LayerKey, LayerCache] = {
            layer: self.layer(num_blocks, config, device) for layer in self.spec.layers
        }
        # A reader is handed its source's keys and values and writes them again, to the same places.
        return layers | {reader: layers[source] for reader, source in self.spec.readers}

    def layer(self, num_blocks: int, config: EngineConfig, device: torch.device) -> LayerCache:
        """What one layer holds."""
        spec, shape = self.spec, (num_blocks, config.block_size, self.spec.num_kv_heads)
        dtype: torch.dtype = getattr(torch, config.kv_dtype)
        keys, values = (zeros((*shape, size), dtype, device) for size in (spec.head_dim, spec.value_dim))
        if dtype == float8_kv.TYPE:
            return Float8KV(keys, values, self.index)
        if dtype != torch.int8:
            return LayerKV(keys, values, self.index)
        key_scales, value_scales = (zeros(shape, torch.float32, device) for _ in range(2))
        return RoundedKV(keys, values, self.index, key_scales, value_scales)

    def metadata(self, slots_T: Tensor, tables_BN: Tensor, both_ways: str, *, early: bool) -> GroupMetadata:
        """See TableCache."""
        return GroupMetadata(
            slots_T,
            tables_BN,
            window=self.spec.window,
            ahead=_AHEAD.get(both_ways, "ranges"),
            kv_heads=self.spec.num_kv_heads if early else None,
        )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; in the host's memory as pages that take no memory and no time until they are written.

    A layer's first pages are small: the blocks of a few sequences are the first, and each layer would take a huge page
    for their keys and one for their values.
    """
    if not platform_of(device).shares_host_memory or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return pages.zeros(math.prod(shape) * dtype.itemsize, small=pages.HUGE_PAGE).view(dtype).view(shape)
