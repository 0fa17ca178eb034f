"""How large a picture or video stands before the tower, read from what its processor gave.

Shapes of tensors alone do not tell: packed patches have no sides, tiles are squares of any picture, and padding is no
part of one. So a size is read from outputs that say it (grids, positions of patches, masks, counts of tiles), by the
general rules below or by a family's own (`Family.looks`). Where nothing says it, nothing is claimed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Size = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """What stands before the tower.

    Attributes:
        width: of the whole picture or frame in pixels, where it is largest; padding is not counted.
        height: the same.
        tiles: pieces that the tower is given, an overview of the whole included; 1 if it is not cut.
        frames: of a video; 0 of a picture.
        step: the pixels to whose multiples the processor brings each side (merged patches, or tiles of a grid that it
            chooses by the picture's shape); 0 where it brings every picture to one shape, or keeps theirs.
    """

    width: int
    height: int
    tiles: int = 1
    frames: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class Sight:
    """A picture or video and what its processor made of it.

    Attributes:
        size: of the picture or of a frame as given, (width, height) in pixels.
        outputs: the processor's own, of this item alone.
        arguments: those that the sub-processor was called with.
        part: the sub-processor.
        whole: the processor that it belongs to, which has a say in some settings.
    """

    size: Size
    outputs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    part: Any
    whole: Any = None

    def setting(self, name: str) -> Any:
        """An option of the call, or the sub-processor's own value, or the processor's; None if it has none."""
        found = (self.arguments.get(name), getattr(self.part, name, None), getattr(self.whole, name, None))
        return next((value for value in found if value is not None), None)

    def edge(self, name: str) -> int | None:
        """A setting that is a length, also where it is written as a height and a width that are equal."""
        value = self.setting(name)
        height = _entry(value, "height")
        if height is not None:
            return int(height) if height == _entry(value, "width") else None
        return int(value) if isinstance(value, int) else None


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


Look = Callable[[Sight], Seen | None]


def picture(sight: Sight) -> Seen | None:
    """What is seen of a picture whose outputs say it in one of the common forms; None if nothing is known.

    These are a grid of patches, rows and columns of tiles, and the pixels of one picture without company.
    """
    outputs = sight.outputs
    if "image_grid_thw" in outputs:
        _, rows, columns = numbers(outputs["image_grid_thw"])
        patch = sight.edge("patch_size")
        return None if patch is None else Seen(columns * patch, rows * patch, step=patch * _merged(sight))
    pixels = outputs.get("pixel_values")
    if pixels is None or not hasattr(pixels, "shape"):
        return None
    height, width = pixels.shape[-2:]
    if "rows" in outputs and "cols" in outputs and len(pixels.shape) == 5:
        rows, columns = numbers(outputs["rows"])[0], numbers(outputs["cols"])[0]
        # 0 of each where it is not cut.
        return Seen(max(1, columns) * width, max(1, rows) * height, pixels.shape[1], step=width if columns else 0)
    if len(pixels.shape) == 4 and tuple(pixels.shape[:2]) == (1, 3):
        # Sizes are told where they differ from picture to picture.
        step = (sight.edge("patch_size") or 0) * _merged(sight) if "image_sizes" in outputs else 0
        return Seen(width, height, step=step)
    return None


def video(sight: Sight) -> Seen | None:
    """What is seen of a video whose outputs are a grid of patches or pixels of frames; None if nothing is known."""
    outputs = sight.outputs
    pixels = outputs.get("pixel_values_videos")
    if pixels is None or not hasattr(pixels, "shape"):
        return None
    if "video_grid_thw" in outputs:
        steps, rows, columns = numbers(outputs["video_grid_thw"])
        patch = sight.edge("patch_size")
        if patch is None:
            return None
        # A patch holds three colours of as many frames as are joined into one step.
        joined = pixels.shape[-1] // (3 * patch * patch)
        return Seen(columns * patch, rows * patch, frames=steps * joined, step=patch * _merged(sight))
    if len(pixels.shape) == 5 and pixels.shape[2] == 3:
        return Seen(pixels.shape[-1], pixels.shape[-2], frames=pixels.shape[1])
    return None


def _merged(sight: Sight) -> int:
    """Patches on a side of what becomes one embedding."""
    return sight.edge("merge_size") or sight.edge("spatial_merge_size") or 1


def numbers(value: Any) -> list[int]:
    """All numbers of a tensor, an array or nested lists, in their order."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [number for entry in value for number in numbers(entry)]
    return [int(value)]


def fitted(size: Size, room: tuple[float, float]) -> Size:
    """The largest size of the same shape inside `room`, both (width, height); a side has at least 1 pixel."""
    scale = min(room[0] / size[0], room[1] / size[1])
    return max(1, int(size[0] * scale + 1e-6)), max(1, int(size[1] * scale + 1e-6))


def stretched_over_tiles(sight: Sight) -> Seen | None:
    """A picture brought to the shape of a grid of tiles, an overview behind them if there are several.

    The outputs count the tiles and say no more, so the processor's own rule is asked for the grid. Where it does not
    give that count, nothing is known.
    """
    count, _, height, width = sight.outputs["pixel_values"].shape
    least, most = sight.setting("min_patches"), sight.setting("max_patches")
    if count == 1:
        # One tile is a grid like others only where there could have been others.
        is_chosen = sight.setting("crop_to_patches") and isinstance(most, int) and most > 1
        return Seen(width, height, 1, step=width if is_chosen else 0)
    ask = _own_rule(sight.part, "get_optimal_tiled_canvas")
    if ask is None or not isinstance(least, int) or not isinstance(most, int):
        return None
    columns, rows = (int(number) for number in ask(sight.size[::-1], (height, width), least, most))
    if count - columns * rows not in (0, 1):
        return None
    return Seen(columns * width, rows * height, count, step=width)


def _own_rule(part: Any, name: str) -> Any:
    """A function that stands beside a processor's class."""
    found = (getattr(sys.modules.get(kind.__module__), name, None) for kind in type(part).__mro__)
    return next((function for function in found if function is not None), None)


def padded_over_tiles(sight: Sight, canvas: Size, tiles: int) -> Seen:
    """A picture fitted into a canvas (width, height) of tiles, enlarged if need be; the rest is padding."""
    return Seen(*fitted(sight.size, canvas), tiles)


def unenlarged_over_tiles(sight: Sight, grid: Size, tiles: int) -> Seen:
    """A picture fitted into a grid (columns, rows) of tiles and padded; only up to one tile's size is it enlarged."""
    height, width = sight.outputs["pixel_values"].shape[-2:]
    room = tuple(
        min(max(given, tile), tile * count)
        for given, tile, count in zip(sight.size, (width, height), grid, strict=True)
    )
    return Seen(*fitted(sight.size, (room[0], room[1])), tiles)


def best_canvas(sight: Sight, resolutions: Any) -> Size:
    """That of the processor's resolutions (height, width) which it takes for this picture, as (width, height)."""
    from transformers.image_processing_utils import select_best_resolution

    height, width = select_best_resolution(sight.size[::-1], resolutions)
    return int(width), int(height)


def at_positions(positions: Any, patch: int) -> Size:
    """The size of what lies in patches at positions (..., 2) of (x, y); those below 0 are padding."""
    ends = positions.reshape(-1, 2).max(dim=0).values + 1
    return int(ends[0]) * patch, int(ends[1]) * patch


def under_mask(mask: Any) -> Size:
    """The size of what a mask (height, width) of pixels keeps, as (width, height)."""
    return int(mask.any(dim=0).sum()), int(mask.any(dim=1).sum())


def in_pools(pools: Any, grid: Size, pool: Size, patch: int) -> Size:
    """The size of what is pooled by windows (rows * columns, entries) of patches; entries below 0 are padding.

    Args:
        pools: the numbers of the patches in each window.
        grid: (rows, columns) of windows.
        pool: (rows, columns) of patches in a window.
        patch: pixels of a patch's side.
    """
    taken = pools.reshape(*grid, *pool) >= 0
    columns, rows = int(taken.any(dim=2).any(dim=0).sum()), int(taken.any(dim=3).any(dim=1).sum())
    return columns * patch, rows * patch
