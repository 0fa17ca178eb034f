"""H2OVL's tiles: with `use_msac`, a lone image is cut along two grids, and the second does not divide the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families._shared.intern.processing import Grid, TileImageProcessor, TileOptions, best_grid, cut, grids

# The second grid has at least as many tiles.
_SECOND = 3


class TwoGridOptions(TileOptions, total=False):
    """The options of one call."""

    use_msac: bool


class TwoGridImageProcessor(TileImageProcessor):
    """Cuts a lone image twice: the tiles of the second grid come first, then the first's, then one overview."""

    valid_kwargs: Any = TwoGridOptions

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.use_msac: bool = settings.get("use_msac", False)
        super().__init__(settings)

    def tiles(self, image: Any, options: Mapping[str, Any], alone: bool) -> list[Any]:
        """Return the tiles of an image; see TileImageProcessor.tiles."""
        if not (alone and self.option("use_msac", options)):
            return super().tiles(image, options, alone)
        first, second = self.two_grids(image.size, options)
        # The last tile of each is its overview, or the whole image if there is no other.
        coarse, fine = (cut(image, grid, self.side, thumbnail=True) for grid in (first, second))
        return [*fine[:-1], *coarse[:-1], fine[-1]]

    def two_grids(self, size: Grid, options: Mapping[str, Any]) -> tuple[Grid, Grid]:
        """Return both grids of a lone image; without a fitting second one, that is a single tile."""
        _, most = self.bounds(options)
        first = best_grid(size, grids(1, most), self.side)
        others = [
            grid
            for grid in grids(_SECOND, most)
            if all(ours % theirs for ours, theirs in zip(first, grid, strict=True))
        ]
        return first, best_grid(size, others, self.side)
