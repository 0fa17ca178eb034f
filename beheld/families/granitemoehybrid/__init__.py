"""Granite 4 hybrid: most layers are Mamba-2, a few attention, with experts or without."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape
from beheld.families._shared.mamba.config import head_state
from beheld.families.family import Family, KnownCheckpoint


def state_of(text: Any) -> StateShape:
    """Return what a layer of Mamba-2 keeps."""
    heads, groups = text.mamba_n_heads, text.mamba_n_groups
    return head_state(heads, text.mamba_d_head, groups, text.mamba_d_state, text.mamba_d_conv)


FAMILY = Family(
    model_types=("granitemoehybrid",),
    tested=(
        KnownCheckpoint(
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            "ibm-granite/granite-4.0-h-tiny",
            note="Mamba-2 in most layers; experts",
        ),
    ),
    state=state_of,
    calls=("qwen3_coder", "hermes", "granite"),
    reasoning=("think",),
)
