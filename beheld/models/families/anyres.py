"""LLaVA-NeXT and LLaVA-OneVision: pictures cut into tiles, as many as their shape asks for.

A picture's `pixel_values` are (1, tiles, channels, height, width); the towers also take the tiles of all pictures in
one row (tiles, ...), which needs no padding. OneVision cuts a picture only if it is the only one of its prompt, and
learns that from `batch_num_images`; so lone pictures and others do not share a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from beheld.core.plan import EncodeItem
from beheld.models.families import TowerCall, plain


def combine(items: Sequence[EncodeItem]) -> list[TowerCall]:
    """Group pictures by whether they were cut; everything else goes by the plain rule."""
    tiled: dict[bool, list[int]] = {}
    others: list[int] = []
    for index, item in enumerate(items):
        if item.modality == "image" and "pixel_values" in item.features:
            tiled.setdefault(_alone(item), []).append(index)
        else:
            others.append(index)
    calls = [
        ("image", indices, _tiles([items[i].features for i in indices], alone)) for alone, indices in tiled.items()
    ]
    for modality, indices, options in plain.combine([items[i] for i in others]):
        calls.append((modality, [others[i] for i in indices], options))
    return calls


def _alone(item: EncodeItem) -> bool:
    count = item.features.get("batch_num_images")
    return count is None or int(torch.as_tensor(count).reshape(-1)[0]) == 1


def _tiles(features: Sequence[Any], alone: bool) -> dict[str, Any]:
    tiles = [f["pixel_values"].flatten(0, 1) if f["pixel_values"].dim() == 5 else f["pixel_values"] for f in features]
    options = {"pixel_values": torch.cat(tiles), "image_sizes": torch.cat([f["image_sizes"] for f in features])}
    if not alone:
        # Any count above one tells the model that these pictures were not cut.
        options["batch_num_images"] = torch.tensor([max(2, len(features))])
    return options


def with_newlines(videos_VEH: torch.Tensor, newline_H: torch.Tensor) -> torch.Tensor:
    """OneVision's videos end with a newline embedding, which older versions of transformers add outside the tower."""
    return torch.cat([videos_VEH, newline_H.expand(videos_VEH.shape[0], 1, -1).to(videos_VEH)], dim=1)
