"""The protocol of an attention backend, and the metadata that it gets.

Shapes: T tokens of the step, B sequences, D of them decoding (one token each), H query heads, K key-value heads,
C head size, N blocks of a table, S slots (block * block_size + offset), L padded length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(eq=False)
class GroupMetadata:
    """Where one cache group's blocks of this step lie, and what its layers see.

    Attributes:
        slots_T: int64, the slot each token's key and value go to.
        tables_BN: int32, block tables, one row per sequence of the step.
        window: positions that a query sees, itself included; None for all.
        chunk: of what the window shows, a query sees the positions from the last multiple of this on; None for all.
        kv_heads: K of its layers, where `begin` is to prepare all that it can before any of them runs.
        extra: what a backend prepares once per step for all layers of the group.
        ahead: "ranges" if its layers look ahead within each of AttnMetadata.both_ways, "joint" if each of a sequence's
            ranges also sees its other ones, "never" if they do not look ahead.
    """

    slots_T: Tensor
    tables_BN: Tensor
    window: int | None
    extra: dict[str, Any] = field(default_factory=dict)
    ahead: str = "ranges"
    chunk: int | None = None
    kv_heads: int | None = None


@dataclass(eq=False)
class AttnMetadata:
    """One step's layout. Sequences that decode stand first, one token each; the others follow, token after token.

        tokens:     d0 d1 d2 | p0 p0 p0 p0 | p1 p1
        sequences:   0  1  2 |      3      |   4       num_decodes = 3, starts_B + 1 = q_stops of the first three

    Attributes:
        num_decodes: D.
        starts: for each sequence, the position of its first token in this step (host integers).
        lengths: for each sequence, positions known after this step: start + number of its tokens (host integers).
        lengths_B: the same on the device, int32.
        cu_q_B1: int32, running sum of tokens, one longer than B.
        groups: one per KV group.
        block_size: positions in a block.
        both_ways: for each sequence, the ranges of positions (start, stop) within which a query also sees what comes
            after it (before it, windows apply as usual); each is computed in one step. Empty if this step has none.
        starts_B: int32, `starts` on the device, in a pass that is captured: there all numbers come from the device.
            `starts` and `lengths` only say how many sequences there are at most, and which of them always start at
            position 0 (the others have 1 here).
        sequences: for each sequence, a number that identifies it in later steps; empty in passes that are no step.
        stored: True if the cache holds the tokens' keys and values already, so that nothing is stored.
    """

    num_decodes: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    lengths_B: Tensor
    cu_q_B1: Tensor
    groups: tuple[GroupMetadata, ...]
    block_size: int
    both_ways: tuple[tuple[tuple[int, int], ...], ...] = ()
    starts_B: Tensor | None = None
    sequences: tuple[int, ...] = ()
    stored: bool = False


class LayerCache(Protocol):
    """What the device holds of one layer, in blocks; each kind of layer knows its own tensors.

    Attributes:
        group: which of AttnMetadata.groups the layer belongs to.
    """

    group: int

    @property
    def num_blocks(self) -> int:
        """The null block included."""

    def clear(self, blocks: slice) -> None:
        """Make these blocks zero."""


@dataclass(eq=False)
class LayerKV:
    """Keys and values of one layer, of shape (num_blocks, block_size, K, C); see LayerCache."""

    keys: Tensor
    values: Tensor
    group: int

    @property
    def num_blocks(self) -> int:
        """The null block included."""
        return len(self.keys)

    def clear(self, blocks: slice) -> None:
        """Make these blocks zero."""
        self.keys[blocks].zero_()
        self.values[blocks].zero_()


class AttentionBackend(Protocol):
    """A way to compute attention on the paged cache."""

    name: str
    # True if a CUDA graph may hold a pass that prefills; see AttnMetadata.starts_B.
    captures_prefill: bool
    # True if `store` may be called in a step in which some sequences decode.
    stores_with_decodes: bool

    def begin(self, metadata: AttnMetadata) -> None:
        """Prepare what all layers of a step share; called once per step."""

    def attend(
        self,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
        kv: LayerKV,
        metadata: AttnMetadata,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Store the step's keys and values, attend causally to all known positions; returns (T, H, C)."""

    def store(self, k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV, metadata: AttnMetadata) -> None:
        """Store the step's keys and values, and compute nothing."""
