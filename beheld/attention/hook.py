"""Registers our attention in transformers' AttentionInterface.

transformers builds no masks for a name that its mask interface does not know, and calls the function once per text
layer with query, key and value after the rotary embedding: all that a paged cache needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beheld.attention.latent import LatentUp
from beheld.attention.op import attend_latent, attend_layer
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
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "use_cache",
    }
)


def register() -> str:
    """Register the hook (repeated calls are harmless) and return its name."""
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
    query_scale: Tensor | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention of one layer: query (1, H, T, C), key and value (1, K, T, C) -> (1, T, H, C).

    `s_aux` (H) is transformers' name for sinks, see AttentionBackend.attend. `query_scale` (1, 1, T, 1) multiplies the
    queries of layers with `scales_queries` set at load. `position_bias` (H, D) is a family's own: see attend_layer.
    A mask without elements stands for none, for layers that index the mask before they pass it on.

    Raises:
        ModelError: the layer asks for something that the backends do not compute.
    """
    unknown = [name for name, given in options.items() if given is not None and name not in _HARMLESS]
    if position_bias is not None and position_bias.dim() != 2:
        # Of transformers' own making, by query and key.
        unknown.append("position_bias")
    if (attention_mask is not None and attention_mask.numel()) or unknown:
        raise ModelError(f"{type(module).__name__} needs unsupported attention options: {unknown or 'a mask'}.")
    if query_scale is not None and getattr(module, "scales_queries", False):
        query = (query * query_scale).to(query.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if position_bias is not None:
        given = (query, key, value, sliding_window, scale, softcap, s_aux)
        return attend_layer(_layer_of(module), *given, bias_HD=position_bias), None
    up = getattr(module, "kv_b_proj", None)
    if isinstance(up, LatentUp):
        if sliding_window is not None or softcap is not None or s_aux is not None:
            raise ModelError(f"{type(module).__name__} has latents with a window, a soft cap or sinks.")
        return _latent_attention(module, query, key, up, scale), None
    if torch.compiler.is_compiling():
        # The layer's number as a tensor (op.number_layers), so that layers share one compiled form.
        number = module.layer_number
        return torch.ops.beheld.attend(query, key, value, number, sliding_window, scale, softcap, s_aux), None
    return attend_layer(_layer_of(module), query, key, value, sliding_window, scale, softcap, s_aux), None


def _latent_attention(module: Any, query: Tensor, latent: Tensor, up: LatentUp, scale: float) -> Tensor:
    """Attend to latents, (1, 1, T, W); see models/surgery/latent.py."""
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.beheld.attend_latent(query, latent, up.up_HDR, module.layer_number, scale)
        return made
    return attend_latent(_layer_of(module), query, latent, up.up_HDR, scale)


def _layer_of(module: Any) -> int:
    layer: int | None = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelError(f"{type(module).__name__} called attention without a layer index of the text model.")
    return layer
