"""Configurations of models with state spaces; no torch."""

from __future__ import annotations

from beheld.core.config import StateShape


def head_state(heads: int, head_dim: int, groups: int, state_dim: int, conv_length: int) -> StateShape:
    """Return what a layer of Mamba-2 keeps."""
    channels = heads * head_dim + 2 * groups * state_dim
    return StateShape((heads, head_dim, state_dim), channels, conv_length)


def channel_state(channels: int, state_dim: int, conv_length: int) -> StateShape:
    """Return what a layer of Mamba-1 keeps."""
    return StateShape((channels, state_dim), channels, conv_length)
