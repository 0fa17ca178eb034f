"""Registers our attention under a name in transformers' AttentionInterface.

A name that the mask interface does not know makes transformers skip building masks, and the function is called once per
text layer with query, key and value after the rotary embedding: all that a paged cache needs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.attention.context import current
from beheld.core.errors import ModelError

NAME = "beheld_paged"

# Keywords that transformers' layers pass for other implementations and that change nothing here.
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "past_key_values",
        "position_ids",
        "use_cache",
    }
)


def register() -> str:
    """Register the hook (again is harmless) and return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    return NAME


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer. query (1, H, T, C), key and value (1, K, T, C) -> (1, T, H, C).

    Raises:
        ModelError: the layer asks for something the backends do not compute.
    """
    context = current()
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer not in context.kv:
        raise ModelError(f"{type(module).__name__} called attention without a layer index of the text model.")
    kv = context.kv[layer]
    window = context.metadata.groups[kv.group].window
    if sliding_window != window:
        raise ModelError(f"Layer {layer} asks for the window {sliding_window}, its cache was made for {window}.")
    unknown = [name for name, given in options.items() if given is not None and name not in _HARMLESS]
    if attention_mask is not None or unknown:
        raise ModelError(f"{type(module).__name__} needs attention options that are not built: {unknown or 'a mask'}.")
    context.called[layer] = context.called.get(layer, 0) + 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = context.backend.attend(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), kv, context.metadata, scale, softcap
    )
    return out.unsqueeze(0), None
