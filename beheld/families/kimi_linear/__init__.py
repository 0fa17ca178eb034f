"""Kimi-Linear: Kimi's delta attention, whose gate decays by channel, and latent attention without positions."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape
from beheld.families.family import Family


def state_of(text: Any) -> StateShape:
    """Return what a layer of Kimi's delta attention keeps."""
    heads, size = text.linear_num_heads, text.linear_head_dim
    return StateShape((heads, size, size), 3 * heads * size, text.linear_conv_kernel_dim)


FAMILY = Family(
    model_types=("kimi_linear",),
    state=state_of,
    calls=("kimi_k2",),
)
