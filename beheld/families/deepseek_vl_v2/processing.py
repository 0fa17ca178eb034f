"""DeepSeek-VL2's processor: an image is fitted into the candidate resolution that keeps most of it.

Tiles are cut from the padded canvas. In a prompt of more than two images, each has the canvas of one tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from beheld.families._shared.deepseek.processing import Grid, ViewImageProcessor, ViewOptions, ViewProcessor
from beheld.families._shared.deepseek.processing import load as load_views


class CanvasOptions(ViewOptions, total=False):
    """The options of one call."""

    candidate_resolutions: list[list[int]]


class CanvasImageProcessor(ViewImageProcessor):
    """Makes the tower's input of images."""

    valid_kwargs: Any = CanvasOptions

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.candidate_resolutions: Sequence[Sequence[int]] = settings["candidate_resolutions"]
        self.side = self.candidate_resolutions[0][0]

    def sides(self, options: Mapping[str, Any]) -> Grid:
        """Return the sides of an overview and of a tile; they are equal."""
        return self.side, self.side

    def views(self, image: Any, options: Mapping[str, Any]) -> tuple[Any, list[Any], Grid]:
        """Return the overview of an image, its tiles row by row, and their columns and rows."""
        side = self.side
        width, height = (side, side) if options.get("among") else self.canvas(image.size, options)
        canvas = self.padded(image, (width, height), options)
        corners = [(x, y) for y in range(0, height, side) for x in range(0, width, side)]
        tiles = [canvas.crop((x, y, x + side, y + side)) for x, y in corners]
        return self.padded(image, (side, side), options), tiles, (width // side, height // side)

    def canvas(self, size: Grid, options: Mapping[str, Any]) -> Grid:
        """Return the resolution that keeps most pixels of an image of `size`; of equals, the smallest.

        Raises:
            ValueError: a resolution is not one of whole tiles.
        """
        whole = size[0] * size[1]
        best, most, waste = (self.side, self.side), 0, float("inf")
        for width, height in self.option("candidate_resolutions", options):
            if min(width, height) < 1 or width % self.side or height % self.side:
                raise ValueError(f"The candidate resolution {width} x {height} is not one of tiles of {self.side}")
            scale = min(width / size[0], height / size[1])
            kept = min(int(size[0] * scale) * int(size[1] * scale), whole)
            wasted = width * height - kept
            if kept > most or (kept == most and wasted < waste):
                best, most, waste = (width, height), kept, wasted
        return best


class CanvasProcessor(ViewProcessor):
    """Images and text of a prompt; `most_cut` is the largest number of images whose canvas their shapes choose."""

    most_cut: int

    def options_of(self, images: Sequence[Any]) -> dict[str, Any]:
        """Say whether there are too many images to cut them."""
        return {"among": len(images) > self.most_cut}


def load(path: Path, added: Sequence[str], most_cut: int) -> Any:
    """Make the processor of the checkpoint in `path`; see CanvasProcessor and the shared `load`."""
    made = load_views(path, CanvasImageProcessor, CanvasProcessor, added)
    made.most_cut = most_cut
    return made
