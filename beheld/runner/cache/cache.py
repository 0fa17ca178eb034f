"""What the runner asks of a layer group's part of the cache: how much memory it takes, and which tensors it holds.

The other half, who holds which of its blocks, is `scheduler/cache/group.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from beheld.attention.backend import GroupMetadata, LayerCache, LayerKey
from beheld.attention.context import CrossContext
from beheld.attention.cross import CrossBackend, CrossMetadata
from beheld.core.config import Capacity, EngineConfig, KVGroup
from beheld.models.adapter import ModelAdapter


class DeviceCache(Protocol):
    """One layer group's memory on the device, counted in blocks. It holds no tensor itself."""

    spec: KVGroup
    no_graph: str | None
    """Why a CUDA graph cannot hold a step of the group's layers; None if it can."""
    captures_prefill: bool
    """Whether a CUDA graph can hold a step that prefills, if the attention backend allows it."""

    def block_bytes(self, config: EngineConfig) -> int:
        """What a block takes, over all layers of the group."""

    def needed_blocks(self, config: EngineConfig) -> int:
        """Blocks without which one sequence of the greatest length could not run, the null block included."""

    def most_blocks(self, config: EngineConfig) -> int:
        """Blocks beyond which more would never be used, the null block included."""

    def share_of(self, level: int, config: EngineConfig) -> int:
        """How many it takes next to `level` blocks of a group that keeps every position."""

    def chosen_blocks(self, wanted: int, config: EngineConfig) -> int:
        """How many it takes where a user asks for `wanted` blocks in each group."""


class TableCache(DeviceCache, Protocol):
    """Of a group whose layers keep something in blocks, found by a table of each sequence."""

    def allocate(self, num_blocks: int, config: EngineConfig, device: torch.device) -> dict[LayerKey, LayerCache]:
        """Layer, or StateOf(layer) -> what it holds: zeros at first."""

    def metadata(self, slots_T: Tensor, tables_BN: Tensor, both_ways: str, *, early: bool) -> GroupMetadata:
        """What the group's layers share in one step.

        Args:
            slots_T: where each token's block entry lies, see GroupMetadata.
            tables_BN: the tables of the step's sequences.
            both_ways: see ModelInfo.
            early: one row decodes, in kernels that may begin before the previous ones have ended.
        """


class StateCache(DeviceCache, Protocol):
    """Of a group whose layers attend to states of media items, which the encoder cache keeps by digest.

    Its blocks are only a unit: one counts as many states as a block of the other groups has positions.
    """

    def max_states(self, num_blocks: int, config: EngineConfig) -> int:
        """States that may be on the device at once."""

    def context(self, backend: CrossBackend, found: CrossMetadata) -> CrossContext:
        """What the group's layers look at in one pass."""

    def blank(self, num_tokens: int, adapter: ModelAdapter) -> CrossMetadata:
        """All tokens look at one item of zeros, of the greatest size: for passes that only measure."""


@dataclass(frozen=True, eq=False)
class DeviceCaches:
    """The parts of all groups of a model.

    Attributes:
        tables: of the groups with block tables, which come first in ModelInfo.kv_groups.
        states: of the group that attends to states of items, which comes last; None if there is none.
        both_ways: see ModelInfo.
    """

    tables: tuple[TableCache, ...]
    states: StateCache | None
    both_ways: str

    @property
    def all(self) -> tuple[DeviceCache, ...]:
        """In the order of ModelInfo.kv_groups."""
        return self.tables if self.states is None else (*self.tables, self.states)

    @property
    def no_graph(self) -> str | None:
        """Why a CUDA graph cannot hold a step; None if it can."""
        return next((cache.no_graph for cache in self.all if cache.no_graph is not None), None)

    @property
    def captures_prefill(self) -> bool:
        """Whether a CUDA graph can hold a step that prefills, if the attention backend allows it."""
        return all(cache.captures_prefill for cache in self.all)

    def allocate(self, config: EngineConfig, capacity: Capacity, device: torch.device) -> dict[LayerKey, LayerCache]:
        """What each layer with blocks holds: layer -> tensors."""
        counts = capacity.num_blocks[: len(self.tables)]
        made: dict[LayerKey, LayerCache] = {}
        for cache, count in zip(self.tables, counts, strict=True):
            made |= cache.allocate(count, config, device)
        return made

    def metadata(
        self, slots_GT: Sequence[Tensor], tables_GBN: Sequence[Tensor], *, early: bool = False
    ) -> tuple[GroupMetadata, ...]:
        """Of one step, for each group with tables; see TableCache."""
        return tuple(
            cache.metadata(slots_T, tables_BN, self.both_ways, early=early)
            for cache, slots_T, tables_BN in zip(self.tables, slots_GT, tables_GBN, strict=True)
        )
