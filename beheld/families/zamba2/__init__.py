"""Zamba2: all layers are Mamba-2, and some have attention before it, with weights that several layers share."""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup, StateShape
from beheld.families._shared.mamba.config import head_state
from beheld.families.family import Family


def state_of(text: Any) -> StateShape:
    """Return what a layer of Mamba-2 keeps."""
    groups, size = text.mamba_ngroups, text.mamba_d_state
    return head_state(text.n_mamba_heads, text.mamba_headdim, groups, size, text.mamba_d_conv)


def groups_of(config: Any) -> tuple[KVGroup, ...]:
    """Return the groups; attention takes the embeddings too, and its heads are twice as large."""
    text = config.get_text_config(decoder=True)
    size, layers = text.attention_head_dim, tuple(text.hybrid_layer_ids)
    states = KVGroup("recurrent", tuple(range(text.num_hidden_layers)), 0, 0, 0, state=state_of(text))
    return (KVGroup("full", layers, text.num_key_value_heads, size, size), states) if layers else (states,)


FAMILY = Family(
    model_types=("zamba2",),
    kv_groups=groups_of,
    state=state_of,
)
