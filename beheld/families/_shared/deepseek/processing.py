"""Images in views, and DeepSeek's tokenizer.

Every prompt begins with the token for the beginning of a text, whatever tokenizer_config.json says: the published code
puts it there itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from beheld.checkpoint.files import read_json
from beheld.core.errors import ModelError

IMAGE = "<image>"
SETTINGS = "processor_config.json"
_REMEDY = "Fetch the checkpoint again."

Grid = tuple[int, int]


def fitted(size: Grid, room: Grid) -> Grid:
    """Return the width and height of an image of `size` that ImageOps.pad has fitted into a room."""
    width, height = size
    if width * room[1] > height * room[0]:
        return room[0], round(height / width * room[0])
    return round(width / height * room[1]), room[1]


class ViewOptions(TypedDict, total=False):
    """The options of one call."""

    image_mean: list[float]
    image_std: list[float]
    normalize: bool


class ViewImageProcessor(ImageProcessingMixin):
    """Makes the tower's input of images; a subclass says which views an image has."""

    model_input_names = ("pixel_values", "pixel_values_local", "grids")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.image_mean: list[float] = settings.get("image_mean", [0.5] * 3)
        self.image_std: list[float] = settings.get("image_std", [0.5] * 3)
        self.normalize: bool = settings.get("normalize", True)
        self.patch_size: int = settings["patch_size"]
        self.downsample_ratio: int = settings["downsample_ratio"]
        super().__init__()

    def option(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return an option of the call, else the setting."""
        value = options.get(name)
        return getattr(self, name) if value is None else value

    def views(self, image: Any, options: Mapping[str, Any]) -> tuple[Any, list[Any], Grid]:
        """Return the overview of an image, its tiles row by row, and their columns and rows."""
        raise NotImplementedError

    def sides(self, options: Mapping[str, Any]) -> Grid:
        """Return the sides of an overview and of a tile in pixels."""
        raise NotImplementedError

    def num_embeds(self, grid: Grid, options: Mapping[str, Any]) -> int:
        """Return the number of embeddings of an image of a grid (columns, rows) of tiles."""
        overview, tile = (math.ceil(side // self.patch_size / self.downsample_ratio) for side in self.sides(options))
        columns, rows = grid
        tiles = rows * tile * (columns * tile + 1) if columns * rows else 0
        return overview * (overview + 1) + 1 + tiles

    def padded(self, image: Any, size: Grid, options: Mapping[str, Any]) -> Any:
        """Return an image that fills `size` without losing its shape, with gray around it.

        Raises:
            ValueError: nothing is left of the image.
        """
        if min(fitted(image.size, size)) < 1:
            raise ValueError(f"An image of {image.width} x {image.height} pixels is too narrow")
        mean = self.option("image_mean", options)
        return ImageOps.pad(image, size, color=tuple(int(value * 255) for value in mean))

    def __call__(self, images: Sequence[Any], **options: Any) -> dict[str, Tensor]:
        """Return the arguments of ViewsModel.get_image_features."""
        found = [self.views(image.convert("RGB"), options) for image in images]
        overviews, tiles, grids = zip(*found, strict=True)
        side = self.sides(options)[1]
        local = [self._pixels(tile, options) for own in tiles for tile in own]
        return {
            "pixel_values": torch.stack([self._pixels(overview, options) for overview in overviews]),
            "pixel_values_local": torch.stack(local) if local else torch.empty(0, 3, side, side),
            "grids": torch.tensor(grids),
        }

    def _pixels(self, view: Any, options: Mapping[str, Any]) -> Tensor:
        values = torch.from_numpy(np.array(view)).permute(2, 0, 1).to(torch.float32).div(255)
        if not self.option("normalize", options):
            return values
        mean, std = (torch.tensor(self.option(f"image_{name}", options))[:, None, None] for name in ("mean", "std"))
        return (values - mean) / std


class ViewProcessor(ProcessorMixin):
    """Images and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token = IMAGE
        super().__init__(image_processor, tokenizer)

    def _process_images(self, images: Sequence[Any], **options: Any) -> tuple[dict[str, Any], list[str]]:  # type: ignore[override]
        options.pop("return_tensors", None)
        part = self.image_processor
        made = part(images, **options)
        return made, [IMAGE * part.num_embeds((columns, rows), options) for columns, rows in made["grids"].tolist()]

    def options_of(self, images: Sequence[Any]) -> dict[str, Any]:
        """Return the options that follow from the number of a prompt's images."""
        return {}

    def __call__(self, text: Sequence[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        """Prepare one prompt with its images, a list within a list."""
        media: dict[str, Any] = {}
        (prompt,) = text
        if images:
            (own,) = images
            media, texts = self._process_images(own, **self.options_of(own), **options)
            first, *rest = prompt.split(IMAGE)
            prompt = first + "".join(found + part for found, part in zip(texts, rest, strict=True))
        return BatchFeature({**self.tokenizer([prompt], return_tensors=return_tensors), **media})


def read_tokenizer(path: Path) -> Any:
    """Make the tokenizer of tokenizer.json, whose class the files name wrongly; see FamilyInputs.read_tokenizer.

    Raises:
        ModelError: the file is missing.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    if not (path / "tokenizer.json").is_file():
        raise ModelError("The file tokenizer.json is missing.", _REMEDY)
    found = PreTrainedTokenizerFast.from_pretrained(str(path))
    begin, text = found.bos_token, "x"
    if begin is None:
        raise ModelError("tokenizer_config.json has no bos_token, with which every prompt begins.", _REMEDY)
    if found(text)["input_ids"][0] != found.bos_token_id:
        found.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, found.bos_token_id)]
        )
    return found


def load(
    path: Path, images: Callable[[Mapping[str, Any]], Any], whole: Callable[[Any, Any], Any], added: Sequence[str] = ()
) -> Any:
    """Make the processor of the checkpoint in `path`.

    Args:
        path: of the checkpoint.
        images: makes the image processor of the settings.
        whole: makes the processor of both.
        added: special tokens that the published processor adds.

    Raises:
        ModelError: a file or a setting is missing.
    """
    from beheld.inputs.prompt.tokenizer import extended

    settings = read_json(path / SETTINGS)
    for name in ("candidate_resolutions", "downsample_ratio", "patch_size"):
        if not settings.get(name):
            raise ModelError(f"{SETTINGS} is missing, or has no {name}.", _REMEDY)
    return whole(images(settings), extended(read_tokenizer(path), added))
