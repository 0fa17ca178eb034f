"""Lets attention of BERT's form call the engine's own, in decoders that are made of such layers.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.attention.hook import paged_attention


def attending(attention: Any) -> Any:
    """Return a forward that calls our attention; the module has BERT's `query`, `key` and `value`."""
    scale = attention.attention_head_size**-0.5

    def forward(hidden_states: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, None]:
        """Attend (1, T, H) -> (1, T, H)."""
        parts = (attention.query, attention.key, attention.value)
        query, key, value = (
            part(hidden_states).unflatten(-1, (-1, attention.attention_head_size)).transpose(1, 2) for part in parts
        )
        out_1THC, _ = paged_attention(attention, query, key, value, None, scale)
        return out_1THC.flatten(-2), None

    return forward
