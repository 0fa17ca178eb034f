"""LLaVA-OneVision: images in tiles, like LLaVA-NeXT's, if alone; videos end with a newline.

Shapes: V videos, E embeddings of one, H hidden size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from beheld.families._shared import anyres
from beheld.families.model import FamilyModel, pooled


def embeds(model: Any, modality: str, result: Any) -> Any:
    """Return embeddings of a tower's result, those of videos (V, E, H) with a final newline."""
    found = pooled(model, modality, result)
    # transformers before 5.23 adds it outside the tower; these versions name frames like images.
    is_older = "pixel_values_videos" not in inspect.signature(model.get_video_features).parameters
    return _with_newlines(found, model.model.image_newline) if modality == "video" and is_older else found


def _with_newlines(videos_VEH: Tensor, newline_H: Tensor) -> Tensor:
    return torch.cat([videos_VEH, newline_H.expand(videos_VEH.shape[0], 1, -1).to(videos_VEH)], dim=1)


MODEL = FamilyModel(
    adapt=anyres.adapt,
    combine=anyres.combine,
    embeds=embeds,
    host_features=frozenset(("image_sizes", "batch_num_images")),
)
