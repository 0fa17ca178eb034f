"""LLaVA-NeXT and LLaVA-OneVision: images cut into tiles whose number depends on their shape.

Their towers join an image's tiles again, which takes the image's size. Sizes stay on the host, and the method that
joins tiles is replaced by an equivalent without the unused token counts that it copies to the device, so a call never
synchronizes and can be captured as a graph.

An image's `pixel_values` are (1, tiles, channels, height, width). The towers also accept the tiles of all images in one
row (tiles, ...), which needs no padding. OneVision cuts an image only if it is the only one of its prompt, which
`batch_num_images` tells the model, so lone images and others do not share a call.

Shapes: N tiles of an image (a downscaled copy of the whole first), P patches of a tile, H width, I images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beheld.core.plan import EncodeItem
from beheld.families.model import TowerCall
from beheld.models import tower_calls
from beheld.models.surgery.operation import Changes


def combine(items: Sequence[EncodeItem]) -> list[TowerCall]:
    """Group images by whether they were cut; group other items by the default rule."""
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
    for modality, indices, options in tower_calls.combine([items[i] for i in others]):
        calls.append((modality, [others[i] for i in indices], options))
    return calls


def _alone(item: EncodeItem) -> bool:
    count = item.features.get("batch_num_images")
    return count is None or int(torch.as_tensor(count).reshape(-1)[0]) == 1


def _tiles(features: Sequence[Any], alone: bool) -> dict[str, Any]:
    tiles = [f["pixel_values"].flatten(0, 1) if f["pixel_values"].dim() == 5 else f["pixel_values"] for f in features]
    options = {"pixel_values": torch.cat(tiles), "image_sizes": torch.cat([f["image_sizes"] for f in features])}
    if not alone:
        # Any count above one tells the model that these images were not cut.
        options["batch_num_images"] = torch.tensor([max(2, len(features))])
    return options


@dataclass(frozen=True)
class _Packing:
    """Joins the tiles of images; replaces the model's method.

    Attributes:
        tile: a tile's edge in pixels.
        side: a tile's edge in patches.
        grids: the sizes in pixels (height, width) to which images may be resized before they are cut.
    """

    tile: int
    side: int
    grids: list[Any]

    def __call__(
        self,
        image_features: Sequence[Tensor],
        image_sizes: Tensor,
        vision_feature_select_strategy: str | None = None,
        image_newline: Tensor | None = None,
        vision_aspect_ratio: str | None = None,
    ) -> tuple[list[Tensor], None]:
        """Return H-wide rows for each image of (N, P, H); `image_sizes` (I, 2) on the host."""
        most = None if vision_aspect_ratio is None else int(vision_aspect_ratio.removeprefix("anyres_max_"))
        packed = []
        for tiles_NPH, size in zip(image_features, image_sizes.tolist(), strict=True):
            rest = () if len(tiles_NPH) == 1 else (self._rows(tiles_NPH[1:], size, image_newline, most),)
            if not rest and image_newline is not None:
                rest = (image_newline[None].to(tiles_NPH),)
            packed.append(torch.cat((tiles_NPH[0], *rest)))
        return packed, None

    def _rows(self, tiles_NPH: Tensor, size: list[int], newline_H: Tensor | None, most: int | None) -> Tensor:
        """Return the tiles as one image without its padding, row by row, with a newline after each row."""
        from transformers.image_processing_utils import select_best_resolution
        from transformers.models.llava_next.modeling_llava_next import unpad_image

        height, width = (edge // self.tile for edge in select_best_resolution(tuple(size), self.grids))
        grid = tiles_NPH.view(height, width, self.side, self.side, -1)
        whole = grid.permute(4, 0, 2, 1, 3).contiguous().flatten(1, 2).flatten(2, 3)
        whole = unpad_image(whole, size)
        if most is not None:
            rows, columns = whole.shape[1:]
            ratio = math.sqrt(rows * columns / (most * self.side**2))
            # As in the model: an image that is slightly too large is not cropped.
            if ratio > 1.1:
                fitting = [int(rows // ratio), int(columns // ratio)]
                whole = torch.nn.functional.interpolate(whole[None], fitting, mode="bilinear")[0]
        if newline_H is not None:
            column = newline_H[:, None, None].expand(*whole.shape[:-1], 1).to(whole)
            whole = torch.cat((whole, column), dim=-1)
        rows_EH: Tensor = whole.flatten(1, 2).transpose(0, 1)
        return rows_EH


def adapt(model: Any, changes: Changes) -> None:
    """Replace the method that joins tiles; see FamilyModel.adapt."""
    core, config = model.model, model.config
    tile = config.vision_config.image_size
    packing = _Packing(tile, tile // config.vision_config.patch_size, config.image_grid_pinpoints)
    changes.set(core, "pack_image_features", packing)
