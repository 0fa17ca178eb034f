"""MiMo-V2-Flash: text only; sliding layers have sinks and twice the key-value heads of full ones."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup
from beheld.families.family import Family, ReferenceOptions


def _kv_groups(config: Any) -> tuple[KVGroup, ...]:
    """Values are smaller than keys, and the numbers of heads differ."""
    heads = config.num_key_value_heads
    forms = {
        "full": ("full_attention", heads, None),
        "sliding": ("sliding_attention", 2 * heads, config.sliding_window),
    }
    groups = []
    for kind, (name, count, window) in forms.items():
        layers = tuple(layer for layer, found in enumerate(config.layer_types) if found == name)
        if layers:
            groups.append(KVGroup(kind, layers, count, config.head_dim, config.v_head_dim, window))
    return tuple(groups)


FAMILY = Family(
    model_types=("mimo_v2_flash",),
    kv_groups=_kv_groups,
    # Fused attention of PyTorch has no sinks.
    reference=ReferenceOptions(attention="eager"),
    calls=("qwen3_coder",),
    reasoning=("think",),
)
