"""Runs the last layer of a prompt only for the tokens whose logits are needed.

Of all other tokens, only the last layer's keys and values are kept; its output is unused. So it runs in two parts: its
first norm and its attention for all tokens, where keys and values are stored without attending; then the whole layer
for the needed tokens, each as a decoding sequence. For a long prompt that saves nearly a layer: of Qwen2.5-VL-7B, a
28th of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from beheld.attention.context import tail
from beheld.core.errors import ModelError
from beheld.models.recurrent import recurs
from beheld.models.surgery.operation import Changes

# Families' names of a layer's attention and of the norm between its input and that.
_NAMES = (
    ("self_attn", "input_layernorm"),
    ("self_attn", "operator_norm"),
    ("self_attn", "self_attn_layer_norm"),
    ("attention", "input_layernorm"),
)


def can_shorten(layer: nn.Module) -> bool:
    """Return whether a layer has one attention and a norm before it, under known names, so that the two run alone.

    A layer of another form, such as one of two attentions in turn, or of attention and a recurrent state, always runs
    for all tokens.
    """
    parts = _parts(layer)
    return not recurs(layer) and all(part is not None and not isinstance(part, nn.ModuleList) for part in parts)


def _parts(layer: nn.Module) -> tuple[Any, Any]:
    """Return a layer's attention and the norm before it; None for what it does not have."""
    found = ((getattr(layer, attention, None), getattr(layer, norm, None)) for attention, norm in _NAMES)
    return next((parts for parts in found if None not in parts), (None, None))


def shorten(layer: nn.Module, changes: Changes) -> None:
    """Let a layer process a pass's tail; without a tail it does as before."""
    forward: Callable[..., Any] = layer.forward
    attention, norm = _parts(layer)
    # A layer that is computed otherwise than by its parts does this in its own way: the same numbers are stored.
    stores: Callable[..., object] | None = getattr(forward, "stores", None)

    def shortened(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        part = tail()
        if part is None:
            return forward(hidden_states, *args, **kwargs)
        if args or attention is None or norm is None:
            raise ModelError(f"{type(layer).__name__} has no known part that computes keys and values.")
        rows_S = part.rows_S
        kept = {name: _of_rows(name, value, rows_S) for name, value in kwargs.items()}
        part.storing, part.stored = True, False
        try:
            if stores is None:
                attention(hidden_states=norm(hidden_states), **kwargs)
            else:
                stores(hidden_states, **kwargs)
        finally:
            part.storing = False
        if not part.stored:
            raise ModelError(f"{type(layer).__name__} did not call attention.")
        return forward(hidden_states.index_select(1, rows_S), **kept)

    changes.set(layer, "forward", shortened)


# The axis of tokens, counted from the end.
_AXES = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}


def _of_rows(name: str, value: Any, rows_S: Tensor) -> Any:
    """Select these tokens from a keyword argument.

    Raises:
        ModelError: the argument's token axis is not known.
    """
    if isinstance(value, tuple):
        return tuple(_of_rows(name, each, rows_S) for each in value)
    if not isinstance(value, Tensor) or not value.numel():
        return value
    if name not in _AXES:
        raise ModelError(f"The token axis of {name!r} is not known.")
    return value.index_select(_AXES[name], rows_S)
