"""Phi-3.5-MoE: its configuration has a sliding window that transformers' class does not read."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import Family


def groups_of(config: Any) -> tuple[KVGroup, ...]:
    """Return one group: all layers see all positions."""
    size = config.hidden_size // config.num_attention_heads
    return (KVGroup("full", tuple(range(config.num_hidden_layers)), config.num_key_value_heads, size, size),)


FAMILY = Family(
    model_types=("phimoe",),
    kv_groups=groups_of,
)
