"""Recurrent layers: states of sequences, and those kept for prefixes."""

from __future__ import annotations

import torch
from torch import Tensor

from beheld.attention.backend import GroupMetadata, LayerCache, LayerKey, StateOf
from beheld.attention.recurrent import LayerStates
from beheld.core.config import EngineConfig, StateShape
from beheld.runner.cache.paged import PagedCache, zeros


class RecurrentCache(PagedCache):
    """See TableCache; a block is one state, however many positions it stands for."""

    # A prompt is computed in pieces that end at its checkpoints.
    captures_prefill = False

    @property
    def _shape(self) -> StateShape:
        assert self.spec.state is not None, "a recurrent group says what it keeps"
        return self.spec.state

    def block_bytes(self, config: EngineConfig) -> int:
        """See DeviceCache."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        return self.spec.bytes_per_sequence(dtype.itemsize)

    def needed_blocks(self, config: EngineConfig) -> int:
        """A state to continue from, one of its own, and the null block."""
        return 3

    def most_blocks(self, config: EngineConfig) -> int:
        """Each row's own state and its newest checkpoint, and the checkpoints of twice as many long prompts."""
        kept = -(-config.max_model_len // self.spec.checkpoint_tokens) + 8
        return 2 * config.max_num_seqs * (1 + kept) + 1

    def share_of(self, level: int, config: EngineConfig) -> int:
        """A state for each row first; then a checkpoint for as many positions as there are between two of them."""
        positions = level * config.block_size
        return 1 + min(2 * config.max_num_seqs, level) + positions // self.spec.checkpoint_tokens

    def chosen_blocks(self, wanted: int, config: EngineConfig) -> int:
        """See DeviceCache."""
        return min(max(self.share_of(wanted, config), self.needed_blocks(config)), self.most_blocks(config))

    def allocate(self, num_blocks: int, config: EngineConfig, device: torch.device) -> dict[LayerKey, LayerCache]:
        """See TableCache."""
        return {StateOf(layer): self.layer(num_blocks, config, device) for layer in self.spec.layers}

    def layer(self, num_blocks: int, config: EngineConfig, device: torch.device) -> LayerCache:
        """What one layer holds."""
        shape = self._shape
        inputs = (num_blocks, shape.conv_length - 1, shape.conv_channels)
        return LayerStates(
            zeros((num_blocks, *shape.recurrent), torch.float32, device),
            zeros(inputs, getattr(torch, config.dtype), device),
            self.index,
        )

    def metadata(self, slots_T: Tensor, tables_BN: Tensor, both_ways: str, *, early: bool) -> GroupMetadata:
        """A recurrence looks nowhere ahead, and has no window."""
        return GroupMetadata(slots_T, tables_BN, window=None, ahead="never")
