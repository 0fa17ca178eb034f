"""Phi-3-vision's model as the engine runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from beheld.families.model import FamilyModel

_EMBEDDINGS, _COPY = "model.embed_tokens.weight", "model.vision_embed_tokens.wte.weight"


def renamed(weights: Mapping[str, Tensor], raw: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the weights without the second name of the text's embeddings, if they have it."""
    if _COPY not in weights:
        return None
    made = dict(weights)
    copy = made.pop(_COPY)
    made.setdefault(_EMBEDDINGS, copy)
    return made


MODEL = FamilyModel(
    host_features=frozenset(("image_sizes",)),
    towers={"image": ("model.vision_embed_tokens",)},
    renamed=renamed,
    unused_weights=("model.vision_embed_tokens.img_processor.vision_model.embeddings.position_ids",),
)
