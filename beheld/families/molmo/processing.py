"""Molmo's processor: an image, cut into overlapping crops, after an overview of the whole.

The rule is that of the repository's code. A margin of each crop is left out where another crop covers it; both the
overview and the crops keep the image's shape and are padded with black.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.families._shared.processing import MOST_TILES

IMAGE = "<|image|>"
BEGIN = "<|endoftext|>"
_PREPROCESSOR = "preprocessor_config.json"
_START, _END, _PATCH, _COLUMN = "<im_start>", "<im_end>", "<im_patch>", "<im_col>"
# The code normalizes with CLIP's, whatever the file says.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

Grid = tuple[int, int]


class MolmoOptions(TypedDict, total=False):
    """The options of one call."""

    max_crops: int
    overlap_margins: list[int]


class MolmoImageProcessor(ImageProcessingMixin):
    """Makes the tower's input of images.

    Attributes:
        side: of a crop, in pixels.
        pooled: pooled windows along a crop's side.
    """

    valid_kwargs: Any = MolmoOptions
    model_input_names = ("pixel_values",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        size = settings.get("base_image_input_size", 336)
        self.side: int = size if isinstance(size, int) else size[0]
        self.patch: int = settings.get("image_patch_size", 14)
        self.max_crops: int = settings.get("max_crops", 12)
        self.overlap_margins: tuple[int, int] = tuple(settings.get("overlap_margins", (4, 4)))
        self.pooled = (self.side // self.patch + 1) // 2
        super().__init__()

    def __call__(self, images: Sequence[Any], **options: Any) -> dict[str, Tensor]:
        """Return the arguments of MolmoVisionBackbone, and `grids` (images, 2): rows and columns of patches' tokens."""
        made = [self._image(image.convert("RGB"), options) for image in images]
        return {name: torch.cat([one[name] for one in made]) for name in made[0]}

    def _image(self, image: Any, options: Mapping[str, Any]) -> dict[str, Tensor]:
        margins = self._margins(options)
        tiling = self._tiling(image.size, options)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32).div(255)
        overview, _ = self._padded(pixels, (self.side, self.side))
        canvas, inside = self._padded(pixels, self._canvas(tiling, margins))
        step = self.side - sum(margins) * self.patch
        crops, masks = [overview], []
        for row in range(tiling[0]):
            for column in range(tiling[1]):
                rows, columns = (slice(n * step, n * step + self.side) for n in (row, column))
                crops.append(canvas[:, rows, columns])
                masks.append(self._patches(inside[None, rows, columns]).mean(-1))
        order = self._order(tiling, margins)
        # The code puts the overview before the crops, but its mask, which says that it is partly padded, after theirs:
        # the model was trained with the mask of the next crop for each crop.
        masks.append(torch.full_like(masks[0], -1))
        return {
            "pixel_values": torch.stack([self._patches(crop) for crop in crops]),
            "image_masks": torch.stack(masks),
            "pooled_order": order,
            "sizes": torch.tensor([[len(crops), len(order)]]),
            "grids": torch.tensor([self._grid(tiling, margins)]),
        }

    def _margins(self, options: Mapping[str, Any]) -> Grid:
        margins = options.get("overlap_margins") or self.overlap_margins
        return int(margins[0]), int(margins[1])

    def _canvas(self, tiling: Grid, margins: Grid) -> Grid:
        """Return the height and width in pixels of all crops together."""
        edge = sum(margins) * self.patch
        return tiling[0] * (self.side - edge) + edge, tiling[1] * (self.side - edge) + edge

    def _grid(self, tiling: Grid, margins: Grid) -> list[int]:
        """Return the rows and columns of pooled windows of all crops together."""
        return [(edge // self.patch + 1) // 2 for edge in self._canvas(tiling, margins)]

    def _tiling(self, size: Grid, options: Mapping[str, Any]) -> Grid:
        """Return the rows and columns of crops: those to which the image must be enlarged least, or reduced least.

        Raises:
            ValueError: options leave no crop, or allow too many.
        """
        most = self.max_crops if options.get("max_crops") is None else options["max_crops"]
        margins = self._margins(options)
        edge = sum(margins) * self.patch
        if most > MOST_TILES:
            raise ValueError(f"max_crops {most} must be from 1 to {MOST_TILES}")
        if most < 1 or min(margins) < 0 or margins[0] % 2 or edge >= self.side:
            raise ValueError(f"max_crops {most} and overlap_margins {list(margins)} leave no crop")
        grids = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most]
        grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
        room = np.array(grids, dtype=np.int32) * (self.side - edge)
        own = np.array([size[1] - edge, size[0] - edge], dtype=np.float32)
        with np.errstate(divide="ignore"):
            scales = (room.astype(np.float32) / own).min(axis=-1)
        # An image that is smaller than the margins has a negative size here.
        fits = scales >= 1
        index = int(np.where(fits, scales, 10e9).argmin() if fits.any() else scales.argmax())
        return grids[index]

    def fitted(self, size: Grid, options: Mapping[str, Any]) -> Grid:
        """Return the width and height of an image of `size` in its crops."""
        height, width = self._scaled(
            (size[1], size[0]), self._canvas(self._tiling(size, options), self._margins(options))
        )
        return width, height

    def _scaled(self, size: Grid, room: Grid) -> Grid:
        """Return the height and width of an image that fits into the room; in float32, as it was trained."""
        sides, edges = np.array(size, np.float32), np.array(room, np.float32)
        scale = (edges / sides).min()
        return int(sides[0] * scale), int(sides[1] * scale)

    def _padded(self, pixels: Tensor, room: Grid) -> tuple[Tensor, Tensor]:
        """Return the image (3, *room), resized, padded and normalized, and where it is not padded (*room).

        Raises:
            ValueError: nothing is left of the image.
        """
        height, width = self._scaled((pixels.shape[1], pixels.shape[2]), room)
        if min(height, width) < 1:
            raise ValueError(f"An image of {pixels.shape[2]} x {pixels.shape[1]} pixels is too narrow")
        resized = F.interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0].clamp(0, 1)
        top, left = (room[0] - height) // 2, (room[1] - width) // 2
        around = (left, room[1] - width - left, top, room[0] - height - top)
        mean, std = (torch.tensor(value)[:, None, None] for value in (_MEAN, _STD))
        return (F.pad(resized, around) - mean) / std, F.pad(torch.ones(height, width), around)

    def _patches(self, crop: Tensor) -> Tensor:
        """(channels, side, side) -> (patches, values of a patch), channels last."""
        grid = crop.unflatten(2, (-1, self.patch)).unflatten(1, (-1, self.patch))
        return grid.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)

    def _order(self, tiling: Grid, margins: Grid) -> Tensor:
        """Return the pooled windows (embeddings,) of overview and crops in the order of the prompt."""
        size = self.pooled * self.pooled
        rows, columns = (self._kept(count, margins) for count in tiling)
        windows = [
            size * (1 + row * tiling[1] + column) + y * self.pooled + x for row, y in rows for column, x in columns
        ]
        return torch.tensor([*range(size), *windows])

    def _kept(self, count: int, margins: Grid) -> list[Grid]:
        """Return the pooled windows along one side that are not left out: pairs of a crop and a window in it."""
        whole = self.side // self.patch
        kept: list[Grid] = []
        for crop in range(count):
            first = 0 if crop == 0 else margins[0] // 2
            patches = whole - sum(margins) + margins[0] * (crop == 0) + margins[1] * (crop == count - 1)
            kept += [(crop, first + n) for n in range((patches + 1) // 2)]
        return kept


class MolmoProcessor(ProcessorMixin):
    """Images and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token = IMAGE
        super().__init__(image_processor, tokenizer)

    def _process_images(self, images: Any, **options: Any) -> tuple[dict[str, Tensor], list[str]]:
        options.pop("return_tensors", None)
        made = self.image_processor(images, **options)
        first = [self.image_processor.pooled] * 2
        return made, [_lines(*first) + _lines(*grid) for grid in made.pop("grids").tolist()]

    def __call__(self, text: Sequence[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        """Prepare one prompt with its images, a list within a list."""
        prompt = text[0].replace(f"{IMAGE}\n", "").replace(IMAGE, "")
        media, texts = self._process_images(images[0], **options) if images else ({}, [])
        ids = [index for part in (BEGIN, *texts, f" {prompt}") for index in self.tokenizer(part)["input_ids"]]
        input_ids = torch.tensor([ids])
        return BatchFeature({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **media})


def _lines(rows: int, columns: int) -> str:
    return _START + (_PATCH * columns + _COLUMN) * rows + _END


def load(path: Path) -> MolmoProcessor:
    """Load the processor of the checkpoint in `path`."""
    tokenizer = AutoTokenizer.from_pretrained(str(path), **own_config(read_json(path / CONFIG)))
    return MolmoProcessor(MolmoImageProcessor(read_json(path / _PREPROCESSOR)), tokenizer)
