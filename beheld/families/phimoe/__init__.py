"""Phi-3.5-MoE: its sliding window is as long as its positions."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import Family


def groups_of(config: Any) -> tuple[KVGroup, ...]:
    """Return one group: with a window that holds all positions, layers see all.

    A shorter window is refused when the model is loaded, because its layers do not name it.
    """
    size, window = config.hidden_size // config.num_attention_heads, config.sliding_window
    layers, heads = tuple(range(config.num_hidden_layers)), config.num_key_value_heads
    if window is None or window >= config.max_position_embeddings:
        return (KVGroup("full", layers, heads, size, size),)
    return (KVGroup("sliding", layers, heads, size, size, window),)


FAMILY = Family(
    model_types=("phimoe",),
    kv_groups=groups_of,
)
