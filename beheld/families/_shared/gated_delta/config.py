"""Configurations of models with the gated delta rule; no torch."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape


def delta_state(text: Any) -> StateShape:
    """Return what a layer with the gated delta rule keeps."""
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    key_dim, value_dim = text.linear_key_head_dim, text.linear_value_head_dim
    channels = 2 * keys * key_dim + values * value_dim
    return StateShape((values, key_dim, value_dim), channels, text.linear_conv_kernel_dim)
