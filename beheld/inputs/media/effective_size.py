"""Computes an image's or video's effective size from the processor's outputs: how large the tower receives it.

Tensor shapes alone are not enough: packed patches have no sides, tiles are squares of any image, and padding is not
part of the image. So the size comes from outputs that contain it (grids, patch positions, masks, token counts), by the
general rules below or a family's rule (`FamilyInputs.looks`). Without such outputs the size is unknown.
"""

from __future__ import annotations

import sys
from typing import Any

from beheld.families.inputs import EffectiveSize, ProcessedItem, Size


def of_image(item: ProcessedItem) -> EffectiveSize | None:
    """Return an image's effective size if the outputs have one of the common forms; None if unknown.

    These are a grid of patches, rows and columns of tiles, and the pixels of a single image.
    """
    outputs = item.outputs
    if "image_grid_thw" in outputs:
        _, rows, columns = numbers(outputs["image_grid_thw"])
        patch = item.edge("patch_size")
        return None if patch is None else EffectiveSize(columns * patch, rows * patch, step=patch * _merged(item))
    pixels = outputs.get("pixel_values")
    if pixels is None or not hasattr(pixels, "shape"):
        return None
    height, width = pixels.shape[-2:]
    if "rows" in outputs and "cols" in outputs and len(pixels.shape) == 5:
        rows, columns = numbers(outputs["rows"])[0], numbers(outputs["cols"])[0]
        # Both are 0 for an image that is not cut.
        return EffectiveSize(
            max(1, columns) * width, max(1, rows) * height, pixels.shape[1], step=width if columns else 0
        )
    if len(pixels.shape) == 4 and tuple(pixels.shape[:2]) == (1, 3):
        # Outputs contain sizes if they differ between images.
        step = (item.edge("patch_size") or 0) * _merged(item) if "image_sizes" in outputs else 0
        return EffectiveSize(width, height, step=step)
    return None


def of_video(item: ProcessedItem) -> EffectiveSize | None:
    """Return a video's effective size if its outputs are a grid of patches or pixels of frames; None if unknown."""
    outputs = item.outputs
    pixels = outputs.get("pixel_values_videos")
    if pixels is None or not hasattr(pixels, "shape"):
        return None
    if "video_grid_thw" in outputs:
        steps, rows, columns = numbers(outputs["video_grid_thw"])
        patch = item.edge("patch_size")
        if patch is None:
            return None
        # A patch holds three colours of the frames that are joined into one step.
        joined = pixels.shape[-1] // (3 * patch * patch)
        return EffectiveSize(columns * patch, rows * patch, frames=steps * joined, step=patch * _merged(item))
    if len(pixels.shape) == 5 and pixels.shape[2] == 3:
        return EffectiveSize(pixels.shape[-1], pixels.shape[-2], frames=pixels.shape[1])
    return None


def _merged(item: ProcessedItem) -> int:
    """Return the patches per side of one embedding."""
    return item.edge("merge_size") or item.edge("spatial_merge_size") or 1


def numbers(value: Any) -> list[int]:
    """Return all numbers of a tensor, an array or nested lists, in order."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [number for entry in value for number in numbers(entry)]
    return [int(value)]


def fitted(size: Size, room: tuple[float, float]) -> Size:
    """Return the largest size of the same shape within `room`, both (width, height); each side has at least 1 pixel."""
    scale = min(room[0] / size[0], room[1] / size[1])
    return max(1, int(size[0] * scale + 1e-6)), max(1, int(size[1] * scale + 1e-6))


def stretched_over_tiles(item: ProcessedItem) -> EffectiveSize | None:
    """Return the size of an image resized to the shape of a tile grid, plus an overview if there are several tiles.

    The outputs contain only the number of tiles, so the processor's rule computes the grid. If the rule gives another
    number, the size is unknown.
    """
    count, _, height, width = item.outputs["pixel_values"].shape
    least, most = item.setting("min_patches"), item.setting("max_patches")
    if count == 1:
        # One tile is a grid only if there could have been more.
        is_chosen = item.setting("crop_to_patches") and isinstance(most, int) and most > 1
        return EffectiveSize(width, height, 1, step=width if is_chosen else 0)
    ask = _own_rule(item.part, "get_optimal_tiled_canvas")
    if ask is None or not isinstance(least, int) or not isinstance(most, int):
        return None
    columns, rows = (int(number) for number in ask(item.size[::-1], (height, width), least, most))
    if count - columns * rows not in (0, 1):
        return None
    return EffectiveSize(columns * width, rows * height, count, step=width)


def _own_rule(part: Any, name: str) -> Any:
    """Return a function from the module that defines a processor's class."""
    found = (getattr(sys.modules.get(kind.__module__), name, None) for kind in type(part).__mro__)
    return next((function for function in found if function is not None), None)


def padded_over_tiles(item: ProcessedItem, canvas: Size, tiles: int) -> EffectiveSize:
    """Return the size of an image scaled to fit a canvas (width, height) of tiles; the rest is padding."""
    return EffectiveSize(*fitted(item.size, canvas), tiles)


def unenlarged_over_tiles(item: ProcessedItem, grid: Size, tiles: int) -> EffectiveSize:
    """Return the size of an image fitted into a padded grid (columns, rows) of tiles; enlarged only up to one tile."""
    height, width = item.outputs["pixel_values"].shape[-2:]
    room = tuple(
        min(max(given, tile), tile * count) for given, tile, count in zip(item.size, (width, height), grid, strict=True)
    )
    return EffectiveSize(*fitted(item.size, (room[0], room[1])), tiles)


def best_canvas(item: ProcessedItem, resolutions: Any) -> Size:
    """Return the processor's choice among its resolutions (height, width) for this image, as (width, height)."""
    from transformers.image_processing_utils import select_best_resolution

    height, width = select_best_resolution(item.size[::-1], resolutions)
    return int(width), int(height)


def at_positions(positions: Any, patch: int) -> Size:
    """Return the size covered by patches at positions (..., 2) of (x, y); negative ones are padding."""
    ends = positions.reshape(-1, 2).max(dim=0).values + 1
    return int(ends[0]) * patch, int(ends[1]) * patch


def under_mask(mask: Any) -> Size:
    """Return the size that a mask (height, width) of pixels keeps, as (width, height)."""
    return int(mask.any(dim=0).sum()), int(mask.any(dim=1).sum())


def in_pools(pools: Any, grid: Size, pool: Size, patch: int) -> Size:
    """Return the size covered by pooling windows (rows * columns, entries) of patches; negative entries are padding.

    Args:
        pools: the patch numbers of each window.
        grid: (rows, columns) of windows.
        pool: (rows, columns) of patches in a window.
        patch: pixels of a patch's side.
    """
    taken = pools.reshape(*grid, *pool) >= 0
    columns, rows = int(taken.any(dim=2).any(dim=0).sum()), int(taken.any(dim=3).any(dim=1).sum())
    return columns * patch, rows * patch
