"""Jamba: most layers are Mamba-1, a few attention; experts in every other one."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape
from beheld.families._shared.mamba.config import channel_state
from beheld.families.family import Family, KnownCheckpoint


def state_of(text: Any) -> StateShape:
    """Return what a layer of Mamba-1 keeps."""
    return channel_state(text.mamba_expand * text.hidden_size, text.mamba_d_state, text.mamba_d_conv)


FAMILY = Family(
    model_types=("jamba",),
    tested=(
        KnownCheckpoint(
            "jamba",
            "JambaForCausalLM",
            "ai21labs/AI21-Jamba-Mini-1.7",
            note="Mamba-1 in most layers; experts",
        ),
    ),
    state=state_of,
    calls=("jamba", "hermes"),
    reasoning=("think",),
)
