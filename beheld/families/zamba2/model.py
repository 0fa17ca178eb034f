"""Zamba2: mixers of Mamba-2 on the cache, and attention that knows its layer."""

from __future__ import annotations

from typing import Any

from beheld.families._shared.mamba.mixer import adapt_heads
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers and number the attention of each layer; see FamilyModel.adapt."""
    adapt_heads(model, changes)
    for layer, block in enumerate(model.model.layers):
        if hasattr(block, "shared_transformer"):
            changes.set(block.shared_transformer.self_attn, "layer_idx", layer)


MODEL = FamilyModel(adapt=adapt)
