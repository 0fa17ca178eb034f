"""MiniMax-Text-01 and -M1: lightning attention (linear, with a fixed decay) and softmax attention."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape
from beheld.families.family import Family


def state_of(text: Any) -> StateShape:
    """Return what a layer of lightning attention keeps; it has no convolution."""
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return StateShape((heads, size, size), 3 * heads * size, 1)


FAMILY = Family(
    model_types=("minimax",),
    state=state_of,
    calls=("jamba",),
    reasoning=("think",),
)
