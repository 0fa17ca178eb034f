"""The last layer of a prompt, for the tokens whose logits are wanted alone.

Of all other tokens, nobody reads what the last layer gives; only their keys and values are kept. So it runs in two
parts: its first norm and its attention for all tokens, where keys and values are stored and nothing is attended to; and
the whole of it for the wanted tokens, each then a sequence that decodes. Of a long prompt that saves nearly a layer: of
Qwen2.5-VL-7B, a 28th of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from beheld.attention.context import tail
from beheld.core.errors import ModelError
from beheld.models.surgery.operation import Changes

# What families call the norm between a layer's input and its attention.
_NORMS = ("input_layernorm", "operator_norm", "self_attn_layer_norm")


def shorten(layer: nn.Module, changes: Changes) -> None:
    """Let a layer take a pass's tail; without one it does as before."""
    forward: Callable[..., Any] = layer.forward
    attention = getattr(layer, "self_attn", None)
    norm = next((found for name in _NORMS if (found := getattr(layer, name, None)) is not None), None)

    def shortened(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        part = tail()
        if part is None:
            return forward(hidden_states, *args, **kwargs)
        if args or attention is None or norm is None:
            raise ModelError(f"Which part of {type(layer).__name__} makes keys and values is not known.")
        rows_S = part.rows_S
        kept = {name: _of_rows(name, value, rows_S) for name, value in kwargs.items()}
        part.storing, part.stored = True, False
        try:
            attention(hidden_states=norm(hidden_states), **kwargs)
        finally:
            part.storing = False
        if not part.stored:
            raise ModelError(f"{type(layer).__name__} does not attend.")
        return forward(hidden_states.index_select(1, rows_S), **kept)

    changes.set(layer, "forward", shortened)


# By the place of their tokens' axis, from behind.
_AXES = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}


def _of_rows(name: str, value: Any, rows_S: Tensor) -> Any:
    """The part of a keyword argument that concerns these tokens.

    Raises:
        ModelError: nobody knows which that is.
    """
    if isinstance(value, tuple):
        return tuple(_of_rows(name, each, rows_S) for each in value)
    if not isinstance(value, Tensor):
        return value
    if name not in _AXES:
        raise ModelError(f"Which part of {name!r} concerns which tokens is not known.")
    return value.index_select(_AXES[name], rows_S)
