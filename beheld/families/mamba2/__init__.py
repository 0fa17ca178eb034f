"""Mamba-2 alone, without attention."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape
from beheld.families._shared.mamba.config import head_state
from beheld.families.family import Family


def state_of(text: Any) -> StateShape:
    """Return what a layer of Mamba-2 keeps."""
    return head_state(text.num_heads, text.head_dim, text.n_groups, text.state_size, text.conv_kernel)


FAMILY = Family(
    model_types=("mamba2",),
    state=state_of,
)
