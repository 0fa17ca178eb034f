"""The bytes of blocks of the KV cache, on their way from the device to the host and back.

The bytes of one block are those of each layer's tensors in turn: group by group, layer by layer, and of a layer in the
order of its fields (keys, values, and scales if there are any). All are as they lie in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from beheld.attention.backend import LayerCache, LayerKey
from beheld.core.config import ModelInfo
from beheld.core.plan import BlockKeep, BlockLoad
from beheld.platform.registry import platform_of
from beheld.runner.staging import to_device

# Bytes that are copied to the device at once.
_AT_ONCE = 64 << 20


@dataclass(eq=False)
class SentBlocks:
    """Blocks on their way to the host: complete once the step has ended.

    Attributes:
        parts: (N, bytes of the part), uint8, in the host's memory.
    """

    row: int
    parts: tuple[Tensor, ...]

    def to_host(self) -> tuple[np.ndarray, ...]:
        """See StepResult.kept."""
        return tuple(part.numpy() for part in self.parts)


class BlockBytes:
    """Copies blocks of the cache.

    Args:
        kv: what each layer holds.
    """

    def __init__(self, info: ModelInfo, kv: Mapping[LayerKey, LayerCache]) -> None:
        # Index of the group, and (blocks, bytes of a block) of each tensor.
        self._parts = [
            (index, tensor.view(torch.uint8).flatten(1))
            for index, group in enumerate(info.paged_groups)
            for layer in group.layers
            for tensor in _tensors(kv[layer])
        ]
        self._device = self._parts[0][1].device

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(part.shape[1] for _, part in self._parts)

    @property
    def layout(self) -> str:
        """What a block's bytes are made of, as a text."""
        return ",".join(f"{index}:{part.shape[1]}" for index, part in self._parts)

    def load(self, load: BlockLoad) -> None:
        """Fill blocks."""
        count = max(1, _AT_ONCE // self.block_bytes)
        pinned = platform_of(self._device).pinned_memory
        for start in range(0, len(load.data), count):
            rows = load.data[start : start + count]
            host = torch.empty((len(rows), self.block_bytes), dtype=torch.uint8, pin_memory=pinned)
            np.stack(rows, out=host.numpy())
            data = host.to(self._device, non_blocking=True)
            places = [self._places(blocks[start : start + count]) for blocks in load.blocks]
            first = 0
            for index, part in self._parts:
                stop = first + part.shape[1]
                part.index_copy_(0, places[index], data[:, first:stop])
                first = stop

    def keep(self, keep: BlockKeep) -> SentBlocks:
        """Begin to bring blocks to the host."""
        places = [self._places(blocks) for blocks in keep.blocks]
        return SentBlocks(
            keep.row, tuple(self._sent(part.index_select(0, places[index])) for index, part in self._parts)
        )

    def _sent(self, part: Tensor) -> Tensor:
        if platform_of(self._device).synchronous:
            return part
        pinned = platform_of(self._device).pinned_memory
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned).copy_(part, non_blocking=True)

    def _places(self, blocks: Sequence[int]) -> Tensor:
        # Not as a tensor of the device at once: that would wait for the steps before.
        return to_device({"blocks": np.array(blocks, dtype=np.int64)}, self._device)["blocks"]


def _tensors(layer: LayerCache) -> Iterator[Tensor]:
    """A layer's tensors, in the order of its fields."""
    for each in fields(layer):  # type: ignore[arg-type]
        value = getattr(layer, each.name)
        if isinstance(value, Tensor) and value.numel():
            yield value
