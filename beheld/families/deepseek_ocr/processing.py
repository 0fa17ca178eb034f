"""DeepSeek-OCR's processor: an overview in a square, and tiles if an image is larger than one.

The grid of tiles is chosen as InternVL's is, without regard to the image's shape within it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.families._shared.deepseek.processing import Grid, ViewImageProcessor, ViewOptions, ViewProcessor, fitted
from beheld.families._shared.deepseek.processing import load as load_views
from beheld.families._shared.intern.processing import best_grid, cut, grids
from beheld.families.inputs import EffectiveSize

# Constants of the published code; a smaller checkpoint's processor_config.json overrides the first two.
_TILE = 640
_MAX_CROPS = 6
_LEAST, _MOST = 2, 9
# Up to this side, an image that is not cut loses its shape.
_SQUASHED = 640


class GundamOptions(ViewOptions, total=False):
    """The options of one call: side of the overview and of a tile, whether and how far images are cut."""

    base_size: int
    image_size: int
    crop_mode: bool
    max_crops: int


class GundamImageProcessor(ViewImageProcessor):
    """Makes the towers' input of images; the published code calls its default mode so."""

    valid_kwargs: Any = GundamOptions

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.base_size: int = settings["candidate_resolutions"][0][0]
        self.image_size: int = settings.get("image_size", _TILE)
        self.crop_mode = True
        self.max_crops: int = settings.get("max_crops", _MAX_CROPS)

    def sides(self, options: Mapping[str, Any]) -> Grid:
        """Return the sides of an overview and of a tile in pixels.

        Raises:
            ValueError: a side is smaller than a patch.
        """
        sides: list[int] = [self.option(name, options) for name in ("base_size", "image_size")]
        if min(sides) < self.patch_size:
            raise ValueError(f"base_size {sides[0]} and image_size {sides[1]} must be {self.patch_size} or more")
        return sides[0], sides[1]

    def grid(self, size: Grid, options: Mapping[str, Any]) -> Grid:
        """Return the columns and rows of tiles of an image of `size`; zeros if it is not cut.

        Raises:
            ValueError: the number of tiles is not supported.
        """
        most = self.option("max_crops", options)
        if not _LEAST <= most <= _MOST:
            raise ValueError(f"max_crops {most} is not from {_LEAST} to {_MOST}")
        side = self.sides(options)[1]
        if not self.option("crop_mode", options) or max(size) <= side:
            return 0, 0
        return best_grid(size, grids(_LEAST, most), side)

    def squashes(self, options: Mapping[str, Any]) -> bool:
        """Return whether images lose their shape: small views without tiles."""
        return not self.option("crop_mode", options) and self.sides(options)[1] <= _SQUASHED

    def views(self, image: Any, options: Mapping[str, Any]) -> tuple[Any, list[Any], Grid]:
        """Return the overview of an image, its tiles row by row, and their columns and rows."""
        grid = self.grid(image.size, options)
        base, side = self.sides(options)
        tiles = cut(image, grid, side, thumbnail=False) if grid != (0, 0) else []
        if self.squashes(options):
            image = image.resize((side, side))
        return self.padded(image, (base, base), options), tiles, grid

    def seen(self, size: Grid, options: Mapping[str, Any]) -> EffectiveSize:
        """Return the effective size of an image of `size`: of its tiles together, else of its overview."""
        columns, rows = self.grid(size, options)
        base, side = self.sides(options)
        if columns * rows:
            return EffectiveSize(columns * side, rows * side, 1 + columns * rows, step=side)
        return EffectiveSize(base, base) if self.squashes(options) else EffectiveSize(*fitted(size, (base, base)))


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`."""
    return load_views(path, GundamImageProcessor, ViewProcessor)
