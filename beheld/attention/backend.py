"""The protocol of an attention backend, and the metadata of a step.

Shapes: T tokens of the step, B sequences, D of them decoding (one token each), H query heads, K key-value heads,
C head size, N blocks of a table, S slots (block * block_size + offset), L padded length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from beheld.attention.latent import LatentTurn


@dataclass(eq=False)
class GroupMetadata:
    """One cache group's blocks in this step, and what its layers see.

    Attributes:
        slots_T: int64, the slot where each token's key and value are stored.
        tables_BN: int32, block tables, one row per sequence of the step.
        window: the number of positions that a query sees, its own included; None for all.
        chunk: within the window, a query sees only positions from the last multiple of this on; None for all.
        kv_heads: K of its layers, if `begin` is to prepare everything before any of them runs.
        extra: what a backend prepares once per step for all layers of the group.
        ahead: how far layers look ahead within AttnMetadata.both_ways: "ranges" within each range as far as a
            window reaches, "whole" within each range whatever its window, "joint" also into a sequence's other ranges,
            "never" not at all.
        shared_B: int32, on the device, how many of its first positions each decoding sequence shares with neighbours;
            see triton_shared.py. None if nobody asks.
    """

    slots_T: Tensor
    tables_BN: Tensor
    window: int | None
    extra: dict[str, Any] = field(default_factory=dict)
    ahead: str = "ranges"
    chunk: int | None = None
    kv_heads: int | None = None
    shared_B: Tensor | None = None


@dataclass(eq=False)
class AttnMetadata:
    """One step's layout: decoding sequences first, one token each, then the others, token after token.

        tokens:     d0 d1 d2 | p0 p0 p0 p0 | p1 p1
        sequences:   0  1  2 |      3      |   4       num_decodes = 3, starts_B + 1 = q_stops of the first three

    Attributes:
        num_decodes: D.
        starts: per sequence, the position of its first token in this step (host integers).
        lengths: per sequence, positions known after this step: start + number of its tokens (host integers).
        lengths_B: `lengths` on the device, int32.
        cu_q_B1: int32, cumulative token counts, B + 1 of them.
        groups: one per KV group.
        block_size: positions in a block.
        both_ways: per sequence, the position ranges (start, stop) within which a query also sees later positions
            (windows still limit earlier ones); each range is computed in one step. Empty if this step has none.
        starts_B: int32, `starts` on the device, in a captured pass, where all numbers come from the device. There
            `starts` and `lengths` give only the largest number of sequences, and which of them always start at position
            0 (the others have 1).
        sequences: per sequence, a number that identifies it in later steps; empty in passes that are not steps.
        tables: per group, its block tables on the host, (B, N); empty in passes whose layers do not read them there.
        stored: whether the cache already holds the tokens' keys and values, so that nothing is stored.
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
    tables: tuple[np.ndarray, ...] = ()
    stored: bool = False


class StateOf(NamedTuple):
    """The key of a layer's recurrent state, which a layer may have in addition to keys and values."""

    layer: int


# A layer's number is the key of all else that it keeps.
LayerKey = int | StateOf


class LayerCache(Protocol):
    """One layer's tensors on the device, in blocks; each kind of layer has different tensors.

    Attributes:
        group: the index of the layer's group in AttnMetadata.groups.
    """

    group: int

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, the null block included."""

    def clear(self, blocks: slice) -> None:
        """Zero these blocks."""


@dataclass(eq=False)
class LayerKV:
    """Keys and values of one layer, (num_blocks, block_size, K, C); see LayerCache."""

    keys: Tensor
    values: Tensor
    group: int

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, the null block included."""
        return len(self.keys)

    def clear(self, blocks: slice) -> None:
        """Zero these blocks."""
        self.keys[blocks].zero_()
        self.values[blocks].zero_()

    def write(self, slots_T: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> None:
        """Store keys and values in these slots."""
        for cache, new_TKC in ((self.keys, k_TKC), (self.values, v_TKC)):
            cache.flatten(0, 1).index_copy_(0, slots_T, new_TKC.to(cache.dtype))

    def read(self, slots_L: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values (L, K, C) of these slots as stored; in `dtype` if they are rounded."""
        keys_LKC, values_LKC = (each.flatten(0, 1).index_select(0, slots_L) for each in (self.keys, self.values))
        return keys_LKC, values_LKC

    def as_read(self, k_TKC: Tensor, v_TKC: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention takes for a step's own keys and values: what later steps will read."""
        return k_TKC, v_TKC


@dataclass(eq=False)
class LayerLatent:
    """Latents and rotary keys of one layer, (num_blocks, block_size, W); see attention/latent.py.

    Attributes:
        rank: R.
        shared: the same numbers as keys of one head, whose first R numbers are its values.
    """

    latents: Tensor
    rank: int
    group: int
    shared: LayerKV = field(init=False)

    def __post_init__(self) -> None:
        keys = self.latents.unsqueeze(2)
        self.shared = LayerKV(keys, keys[..., : self.rank], self.group)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, the null block included."""
        return len(self.latents)

    def clear(self, blocks: slice) -> None:
        """Zero these blocks."""
        self.latents[blocks].zero_()


class Sharing(NamedTuple):
    """When a backend reads prefixes that decoding sequences share only once.

    Attributes:
        neighbours: sequences 0 to neighbours - 1 of a batch are neighbours, and so on.
        min_positions: shorter prefixes are not shared.
        min_total: positions that all sequences of a step share, each counted; with fewer, none is shared.
    """

    neighbours: int
    min_positions: int
    min_total: int


class Further(NamedTuple):
    """Attention to something else than positions, which a layer's softmax also covers; see attention/cross.py.

    Attributes:
        sums_TH: float32, the logarithm of the sum of the exponentials of its scores; minus infinity for none.
        values_THC: the mean of its values by those scores alone.
    """

    sums_TH: Tensor
    values_THC: Tensor

    def rows(self, rows: slice) -> Further:
        """Return that of these tokens."""
        return Further(self.sums_TH[rows], self.values_THC[rows])


class AttentionBackend(Protocol):
    """Computes attention on the paged cache."""

    name: str
    # Whether a CUDA graph may contain a pass that prefills; see AttnMetadata.starts_B.
    captures_prefill: bool
    # Whether `store` may be called in a step in which some sequences decode.
    stores_with_decodes: bool
    # When GroupMetadata.shared_B should say what sequences share; None if it is not read.
    sharing: Sharing | None
    # Its kernels of the gated delta rule (delta_rule.py); None for the rule in torch.
    delta: Any

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
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Store the step's keys and values, and attend causally to all known positions; returns (T, H, C).

        `sinks_H`: each head's logit of one more position, which every query sees and whose value is zero.
        """

    def outside_graphs(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Return whether a step with these pieces of prompts, (start, stop) each, is faster outside of a graph."""

    def store(self, k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV, metadata: AttnMetadata) -> None:
        """Store the step's keys and values without computing attention."""

    def attend_latent(
        self, q_THC: Tensor, latent_TW: Tensor, up_HDR: Tensor, kv: LayerLatent, metadata: AttnMetadata, scale: float
    ) -> Tensor:
        """Store the step's latents, and attend causally to all known positions; returns (T, H, V).

        Shapes are those of attention/latent.py.
        """

    def store_latent(self, latent_TW: Tensor, kv: LayerLatent, metadata: AttnMetadata) -> None:
        """Store the step's latents without computing attention."""

    def attend_latent_row(
        self,
        q_HC: Tensor,
        latent_W: Tensor,
        turn: LatentTurn,
        up_HDR: Tensor,
        kv: LayerLatent,
        metadata: AttnMetadata,
        scale: float,
    ) -> Tensor:
        """As `attend_latent` for a step of one decoding row, given as products make it; returns (H, V).

        Args:
            turn: what is applied to query and latent first.
            up_HDR: and all others are contiguous.
        """
