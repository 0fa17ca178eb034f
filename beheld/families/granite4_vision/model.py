"""Granite 4 Vision: an image's embeddings are zero; what its tower makes is added before text layers.

Shapes: E embeddings of one tower call, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beheld.families._shared import anyres
from beheld.families._shared.deepstack import Deepstack
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class _Features(Deepstack):
    """The features of an image for each text layer; a later entry for the same layer replaces an earlier one."""

    def __init__(self, model: Any, changes: Changes) -> None:
        config = model.config
        self._targets = [layer for _, layer in config.deepstack_layer_map] + list(config.spatial_target_layers)
        super().__init__(model, changes, before=list(dict.fromkeys(self._targets)))

    def of_media(self, result: Any) -> Tensor:
        """Return the features of all layers, concatenated: (E, L * H)."""
        by_layer = {layer: torch.cat(tuple(images)) for layer, images in result.deepstack_features}
        return torch.cat([by_layer[layer] for layer in dict.fromkeys(self._targets)], dim=-1)


def embeds(model: Any, modality: str, result: Any) -> Tensor:
    """Return zeros (E, H), in whose place layers add features."""
    _, images = result.deepstack_features[0]
    return torch.zeros_like(torch.cat(tuple(images)))


MODEL = FamilyModel(
    combine=anyres.combine, embeds=embeds, extra_columns=_Features, host_features=frozenset(("image_sizes",))
)
