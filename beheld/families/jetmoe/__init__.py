"""JetMoE: text only; each of a token's experts of attention has heads of its own over the same keys and values."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import Family


def _kv_groups(config: Any) -> tuple[KVGroup, ...]:
    """Return one group: every layer attends to all positions.

    A layer gives its attention each key and value once for each expert of a token, and so they are kept.
    """
    size, heads = config.kv_channels, config.num_key_value_heads * config.num_experts_per_tok
    return (KVGroup("full", tuple(range(config.num_hidden_layers)), heads, size, size),)


FAMILY = Family(model_types=("jetmoe",), kv_groups=_kv_groups)
