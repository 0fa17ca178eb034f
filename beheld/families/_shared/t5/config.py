"""Facts of models with T5's decoder."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup

BIASED = "a learned bias by distance is added to its scores"
"""See ModelInfo.plain_attention."""


def t5_group(config: Any, kind: str, num_layers: int, num_states: int = 0) -> KVGroup:
    """Return all layers of the decoder as one group of this kind."""
    size = config.d_kv
    return KVGroup(kind, tuple(range(num_layers)), config.num_heads, size, size, num_states=num_states)
