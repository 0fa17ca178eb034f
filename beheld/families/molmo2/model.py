"""Molmo 2: the adapter's output for a patch is added to the placeholder's embedding.

Shapes: E embeddings of one item, H hidden size; P patches of one item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.core.plan import EncodeItem
from beheld.families.model import FamilyModel, TowerCall
from beheld.models import tower_calls


def combine(items: Sequence[EncodeItem]) -> list[TowerCall]:
    """Combine by the default rule, but count `*_token_pooling` patches across the items of a call."""
    calls = []
    for modality, indices, options in tower_calls.combine(items):
        name = f"{modality}_token_pooling"
        if name in options:
            moved, before = [], 0
            for index in indices:
                features = items[index].features
                pooling, patches = features[name], features[_PIXELS[modality]]
                # Negative means no patch.
                moved.append(torch.where(pooling < 0, pooling, pooling + before))
                before += patches.shape[0] * patches.shape[1]
            options = options | {name: torch.cat(moved)}
        calls.append((modality, indices, options))
    return calls


_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def embeds(model: Any, modality: str, result: Any) -> list[Tensor]:
    """Return the adapter's (E, H) plus the placeholder's embedding, per item."""
    table = model.get_input_embeddings().weight
    own_H = table[model.config.image_patch_id]
    return [own_H + part.to(own_H.dtype) for part in result.pooler_output]


MODEL = FamilyModel(combine=combine, embeds=embeds)
