"""Mamba-1 alone, without attention: Mamba, and Falcon-Mamba with norms of step sizes, B and C."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape
from beheld.families._shared.mamba.config import channel_state
from beheld.families.family import Family


def state_of(text: Any) -> StateShape:
    """Return what a layer of Mamba-1 keeps."""
    return channel_state(text.intermediate_size, text.state_size, text.conv_kernel)


FAMILY = Family(
    model_types=(
        "mamba",
        "falcon_mamba",
    ),
    state=state_of,
)
