"""DiffLlama: differential attention, whose values are twice as wide as its keys."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import Family


def _kv_groups(config: Any) -> tuple[KVGroup, ...]:
    """Return one group: a head keeps its key, and its values of both halves of the heads."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (KVGroup("full", tuple(range(config.num_hidden_layers)), config.num_key_value_heads, size, 2 * size),)


FAMILY = Family(model_types=("diffllama",), kv_groups=_kv_groups)
