"""GPT-2 and GPT-BigCode: text only, learned positions; the latter's heads may share one key and value."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import Family


def _kv_groups(config: Any) -> tuple[KVGroup, ...]:
    """Return one group: every layer attends to all positions."""
    head_dim = config.hidden_size // config.num_attention_heads
    heads = 1 if getattr(config, "multi_query", False) else config.num_attention_heads
    return (KVGroup("full", tuple(range(config.num_hidden_layers)), heads, head_dim, head_dim),)


FAMILY = Family(
    model_types=("gpt2", "gpt_bigcode"),
    kv_groups=_kv_groups,
)
