"""The tensors of the paged KV cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from beheld.attention.backend import LayerKV
from beheld.core.config import Capacity, EngineConfig, ModelInfo
from beheld.platform.registry import platform_of


def allocate(info: ModelInfo, config: EngineConfig, capacity: Capacity, device: torch.device) -> dict[int, LayerKV]:
    """One LayerKV per layer that attends to the text; layers of one group have equally many blocks. Zero at first."""
    dtype: torch.dtype = getattr(torch, config.kv_dtype)
    layers: dict[int, LayerKV] = {}
    for index, group in enumerate(info.paged_groups):
        blocks = capacity.num_blocks[index]
        for layer in group.layers:
            shape = (blocks, config.block_size, group.num_kv_heads)
            layers[layer] = LayerKV(
                _zeros((*shape, group.head_dim), dtype, device), _zeros((*shape, group.value_dim), dtype, device), index
            )
        # A reader is handed its source's keys and values and writes them again, to the same places.
        layers |= {reader: layers[source] for reader, source in group.readers}
    return layers


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; in the host's memory from numpy, whose zero pages take no memory and no time until they are written."""
    if not platform_of(device).shares_host_memory or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
