"""Decoders of the form of BART's, which attend to an encoder's states between self-attention and MLP."""

from __future__ import annotations

import copy
from typing import Any

from beheld.attention import hook
from beheld.models.cross import CrossAttention
from beheld.models.surgery.operation import Changes


def adapt_decoder(decoder: Any, changes: Changes) -> None:
    """Direct self-attention to our hook, and put our cross-attention in the place of the decoder's own."""
    config = copy.deepcopy(decoder.config)
    config._attn_implementation = hook.register()
    for index, layer in enumerate(decoder.layers):
        changes.set(layer.self_attn, "config", config)
        old = layer.encoder_attn
        projections = {kind: (f"{kind}_proj", getattr(old, f"{kind}_proj")) for kind in "qkv"}
        projections["o"] = ("out_proj", old.out_proj)
        new = CrossAttention(index, projections, {}, old.head_dim, old.scaling)
        changes.exchange(layer, "encoder_attn", new, [name for name, _ in new.named_children()])
