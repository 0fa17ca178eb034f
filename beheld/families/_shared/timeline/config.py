"""The facts of models whose tokens keep time with an audio; see model.py."""

from __future__ import annotations

from beheld.core.config import KVGroup


def timeline_group(hidden_size: int, most: int) -> KVGroup:
    """Return the group that keeps the states of audio with at most this many."""
    return KVGroup("cross", (0,), 1, hidden_size // 2, hidden_size // 2, num_states=most)
