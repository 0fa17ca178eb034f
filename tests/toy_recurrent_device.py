"""The device's half of the toy kind of toy_recurrent.py, and a model that has nothing but such a layer.

Its state after a token is a number that depends on all tokens before it, in order, and is exact in float32.

Shapes: T tokens, S wanted logits, H = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from beheld.attention.backend import LayerCache
from beheld.attention.context import current
from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.plan import EncodeItem, SpanView
from beheld.runner.cache import registry
from beheld.runner.cache.paged import PagedCache, zeros
from tests.toy_recurrent import KIND

_PRIME = 8191


@dataclass(eq=False)
class LayerStates:
    """One state a block, (num_blocks,); see LayerCache."""

    states: Tensor
    group: int

    @property
    def num_blocks(self) -> int:
        return len(self.states)

    def clear(self, blocks: slice) -> None:
        self.states[blocks].zero_()


class ToyRecurrentCache(PagedCache):
    """See TableCache."""

    def kept_positions(self, config: EngineConfig) -> int:
        """A state before a slice and one after it, each in a block."""
        return 2 * config.block_size

    def block_bytes(self, config: EngineConfig) -> int:
        """A block is one number a layer, however many positions it covers."""
        return 4 * len(self.spec.layers)

    def layer(self, num_blocks: int, config: EngineConfig, device: torch.device) -> LayerCache:
        """What one layer holds."""
        return LayerStates(zeros((num_blocks,), torch.float32, device), self.index)


registry.TABLES[KIND] = ToyRecurrentCache


def following(state: float, token: float) -> float:
    """The state after one more token."""
    return (state * 31 + token + 1) % _PRIME


def recur(layer: int, tokens_T: Tensor) -> Tensor:
    """The state after each token of the step, (T,), continued from the cache and kept there."""
    context = current()
    cache = context.kv[layer]
    assert isinstance(cache, LayerStates)
    context.called[layer] = context.called.get(layer, 0) + 1
    metadata, size = context.metadata, context.metadata.block_size
    tables_BN = metadata.groups[cache.group].tables_BN
    made: list[float] = []
    for sequence, (start, stop) in enumerate(zip(metadata.starts, metadata.lengths, strict=True)):
        table = tables_BN[sequence].tolist()
        state = float(cache.states[table[(start - 1) // size]]) if start else 0.0
        for position in range(start, stop):
            state = following(state, float(tokens_T[len(made)]))
            made.append(state)
            block = table[position // size]
            if block and ((position + 1) % size == 0 or position + 1 == stop):
                cache.states[block] = state
    return torch.tensor(made)


class ToyAdapter:
    """See ModelAdapter; the next token follows from the state alone."""

    device, dtype = torch.device("cpu"), torch.float32
    lora = tail_from = seams = None
    tail_stores, position_unit = False, 1

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    def capture_calls(self) -> None:
        """There are no towers."""

    def embed(self, ids_T: Tensor) -> Tensor:
        return ids_T.float().unsqueeze(1)

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        return []

    def positions(
        self, token_ids: Sequence[int], spans: Sequence[SpanView], second: Any = None
    ) -> tuple[np.ndarray, int]:
        return np.arange(len(token_ids), dtype=np.int64)[None], 0

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[Any, ...]:
        return ()

    def hidden(self, embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
        return recur(self.info.kv_groups[0].layers[0], embeds_TH[:, 0]).unsqueeze(1)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        next_S = hidden_SH[:, 0].long() % self.info.vocab_size
        return torch.nn.functional.one_hot(next_S, self.info.vocab_size).float()
