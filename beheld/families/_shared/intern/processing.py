"""Images of models in InternVL's original layout: cut into tiles of a grid that is chosen by the image's shape.

The rule is that of the repositories' code: PIL resizes the image to the grid without regard to its shape, the grid is
cut row by row, and an overview of the whole follows if there are several tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from beheld.checkpoint.files import CONFIG, read_json
from beheld.families._shared.processing import MOST_TILES
from beheld.inputs.prompt.tokenizer import extended

IMAGE = "<image>"
# Of ImageNet, in the repositories' code.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Grid = tuple[int, int]


class TileOptions(TypedDict, total=False):
    """The options of one call."""

    min_dynamic_patch: int
    max_dynamic_patch: int
    dynamic_image_size: bool
    use_thumbnail: bool


@lru_cache(64)
def grids(least: int, most: int) -> tuple[Grid, ...]:
    """Return the grids (columns, rows) of `least` to `most` tiles, smaller ones first."""
    sides = range(1, most + 1)
    # Added to a set in the order of the repositories' code: of two grids that fit equally well, the set's decides.
    ordered = ((i, j) for n in range(least, most + 1) for i in sides[:n] for j in sides[:n])
    fitting = {grid for grid in ordered if least <= grid[0] * grid[1] <= most}
    return tuple(sorted(fitting, key=lambda grid: grid[0] * grid[1]))


def best_grid(size: Grid, among: Sequence[Grid], side: int) -> Grid:
    """Return the grid whose shape is nearest to the image's; of equals, a larger one if the image fills half of it."""
    width, height = size
    best, least = (1, 1), float("inf")
    for columns, rows in among:
        difference = abs(width / height - columns / rows)
        if difference < least or (difference == least and width * height > 0.5 * side * side * columns * rows):
            best, least = (columns, rows), difference
    return best


def cut(image: Any, grid: Grid, side: int, thumbnail: bool) -> list[Any]:
    """Return the tiles of an image, row by row, and an overview if there are several and `thumbnail` is set."""
    columns, rows = grid
    canvas = image.resize((columns * side, rows * side))
    corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    tiles = [canvas.crop((x, y, x + side, y + side)) for x, y in corners]
    return [*tiles, image.resize((side, side))] if thumbnail and len(tiles) > 1 else tiles


class TileImageProcessor(ImageProcessingMixin):
    """Makes the tower's input of images; the settings are config.json's."""

    valid_kwargs: Any = TileOptions
    model_input_names = ("pixel_values",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        vision = settings["vision_config"]
        self.side: int = settings.get("force_image_size") or vision["image_size"]
        self.min_dynamic_patch: int = settings.get("min_dynamic_patch", 1)
        self.max_dynamic_patch: int = settings.get("max_dynamic_patch", 6)
        self.dynamic_image_size: bool = settings.get("dynamic_image_size", False)
        self.use_thumbnail: bool = settings.get("use_thumbnail", False)
        super().__init__()

    def option(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return an option of the call, else the setting."""
        value = options.get(name)
        return getattr(self, name) if value is None else value

    def bounds(self, options: Mapping[str, Any]) -> Grid:
        """Return the least and the largest number of tiles.

        Raises:
            ValueError: they are not whole numbers from 1 to the most that is supported, in this order.
        """
        if not self.option("dynamic_image_size", options):
            return 1, 1
        least, most = (self.option(f"{which}_dynamic_patch", options) for which in ("min", "max"))
        if not 1 <= least <= most <= MOST_TILES:
            raise ValueError(
                f"min_dynamic_patch {least} and max_dynamic_patch {most} must be from 1 to {MOST_TILES}, in this order"
            )
        return least, most

    def grid(self, size: Grid, options: Mapping[str, Any]) -> Grid:
        """Return the grid of an image of `size`."""
        return best_grid(size, grids(*self.bounds(options)), self.side)

    def tiles(self, image: Any, options: Mapping[str, Any], alone: bool) -> list[Any]:
        """Return the tiles of an image; `alone` says whether it is its prompt's only one."""
        thumbnail = self.option("use_thumbnail", options)
        return cut(image, self.grid(image.size, options), self.side, thumbnail)

    def __call__(self, images: Sequence[Any], alone: bool = False, **options: Any) -> dict[str, Any]:
        """Return `pixel_values` (tiles of all images, 3, side, side) and `num_patches` of each image."""
        cut_up = [self.tiles(image.convert("RGB"), options, alone) for image in images]
        pixels = [_pixels(tile) for tiles in cut_up for tile in tiles]
        return {"pixel_values": torch.stack(pixels), "num_patches": torch.tensor([len(tiles) for tiles in cut_up])}


def _pixels(tile: Any) -> Tensor:
    values = torch.from_numpy(np.array(tile)).permute(2, 0, 1).to(torch.float32).div(255)
    return (values - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_STD)[:, None, None]


class TileProcessor(ProcessorMixin):
    """Images and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any, image_seq_length: int = 256) -> None:
        self.image_token = IMAGE
        self.image_seq_length = image_seq_length
        super().__init__(image_processor, tokenizer)

    def words(self, num_tiles: int) -> str:
        """Return the text that an image of `num_tiles` tiles stands for."""
        return f"<img>{'<IMG_CONTEXT>' * self.image_seq_length * num_tiles}</img>"

    def _process_images(  # type: ignore[override]
        self, images: Sequence[Any], alone: bool = False, **options: Any
    ) -> tuple[dict[str, Any], list[str]]:
        options.pop("return_tensors", None)
        made = self.image_processor(images, alone=alone, **options)
        return made, [self.words(count) for count in made["num_patches"].tolist()]

    def __call__(self, text: Sequence[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        """Prepare one prompt with its images, a list within a list."""
        media: dict[str, Any] = {}
        (prompt,) = text
        if images:
            (own,) = images
            media, texts = self._process_images(own, alone=len(own) == 1, **options)
            del media["num_patches"]
            first, *rest = prompt.split(self.image_token)
            prompt = first + "".join(found + part for found, part in zip(texts, rest, strict=True))
        return BatchFeature({**self.tokenizer([prompt], return_tensors=return_tensors), **media})


def embeddings_per_tile(settings: Mapping[str, Any]) -> int:
    """Return the number of embeddings of one tile: its patches, joined by config.json's `downsample_ratio`."""
    vision = settings["vision_config"]
    side = settings.get("force_image_size") or vision["image_size"]
    return int((side // vision["patch_size"]) ** 2 * settings.get("downsample_ratio", 0.5) ** 2)


def with_tiles(
    path: Path, read_tokenizer: Any = None, tiles: Any = TileImageProcessor, whole: Any = TileProcessor
) -> Any:
    """Load the processor of a checkpoint in the original layout; `read_tokenizer` as in FamilyInputs."""
    from transformers import AutoTokenizer

    settings = read_json(path / CONFIG)
    tokenizer = read_tokenizer(path) if read_tokenizer is not None else None
    if tokenizer is None:
        from beheld.checkpoint.convert import own_config

        tokenizer = AutoTokenizer.from_pretrained(str(path), **own_config(settings))
    return whole(tiles(settings), extended(tokenizer, (IMAGE,)), embeddings_per_tile(settings))
