"""Phi-3-vision's processor: an image as large as its number of tiles allows, padded to whole tiles, and an overview.

The rule is that of the repository's code: the longer side becomes a whole number of tiles, the other follows the
image's shape and is padded with white above and below (left and right of a tall image).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError
from beheld.families._shared.processing import MOST_TILES

IMAGE = "<|image|>"
_PREPROCESSOR = "preprocessor_config.json"
# As in config.py.
_TOWER = {"image_size": 336, "patch_size": 14}
_WHITE = (255, 255, 255)
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Phi3VOptions(TypedDict, total=False):
    """The options of one call."""

    num_crops: int
    image_mean: list[float]
    image_std: list[float]


class Phi3VImageProcessor(ImageProcessingMixin):
    """Makes the tower's input of images."""

    valid_kwargs: Any = Phi3VOptions
    model_input_names = ("pixel_values",)

    def __init__(self, settings: Mapping[str, Any], side: int, patch: int) -> None:
        self.num_crops: int = settings.get("num_crops", 1)
        self.image_mean = settings.get("image_mean") or _MEAN
        self.image_std = settings.get("image_std") or _STD
        self.side = side
        self.lines = side // patch // 2
        super().__init__()

    def __call__(
        self,
        images: Sequence[Any],
        num_crops: int | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Return `pixel_values` (tiles of all images, 3, side, side), overviews first, and `image_sizes` (images, 2).

        Raises:
            ValueError: the number of tiles is not supported, or an image is too narrow to have a pixel in its tiles.
        """
        crops = self.num_crops if num_crops is None else num_crops
        mean, std = (
            torch.tensor(v)[:, None, None] for v in (image_mean or self.image_mean, image_std or self.image_std)
        )
        tiles, sizes = [], []
        for image in images:
            canvas = self._canvas(image.convert("RGB"), crops)
            pixels = torch.from_numpy(np.array(canvas)).permute(2, 0, 1).to(torch.float32).div(255)
            pixels = (pixels - mean) / std
            overview = F.interpolate(pixels[None], size=(self.side, self.side), mode="bicubic")
            grid = pixels.unflatten(2, (-1, self.side)).unflatten(1, (-1, self.side))
            tiles += [overview, grid.permute(1, 3, 0, 2, 4).flatten(0, 1)]
            sizes.append([canvas.height, canvas.width])
        return {"pixel_values": torch.cat(tiles), "image_sizes": torch.tensor(sizes)}

    def _canvas(self, image: Image.Image, crops: int) -> Image.Image:
        """Return an image, enlarged or reduced to at most `crops` tiles and padded to whole ones."""
        if not 1 <= crops <= MOST_TILES:
            raise ValueError(f"num_crops {crops} must be from 1 to {MOST_TILES}")
        is_tall = image.width < image.height
        if is_tall:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        ratio = image.width / image.height
        columns = 1
        while (columns + 1) * math.ceil((columns + 1) / ratio) <= crops:
            columns += 1
        width = columns * self.side
        height = int(width / ratio)
        if height < 1:
            raise ValueError(f"An image of {image.width} x {image.height} pixels is too narrow")
        canvas = Image.new("RGB", (width, math.ceil(height / self.side) * self.side), _WHITE)
        canvas.paste(image.resize((width, height), Image.Resampling.BILINEAR), (0, (canvas.height - height) // 2))
        return canvas.transpose(Image.Transpose.TRANSPOSE) if is_tall else canvas

    def num_embeds(self, height: int, width: int) -> int:
        """Return the number of embeddings of an image whose tiles together have this size in pixels."""
        rows, columns = (edge // self.side * self.lines for edge in (height, width))
        return rows * (columns + 1) + 1 + self.lines * (self.lines + 1)


class Phi3VProcessor(ProcessorMixin):
    """Images and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token = IMAGE
        super().__init__(image_processor, tokenizer)

    def _process_images(self, images: Any, **options: Any) -> tuple[dict[str, Tensor], list[str]]:
        options.pop("return_tensors", None)
        made = self.image_processor(images, **options)
        return made, [IMAGE * self.image_processor.num_embeds(*size) for size in made["image_sizes"].tolist()]

    def __call__(self, text: Sequence[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        """Prepare one prompt with its images, a list within a list; each piece of text is encoded as a text."""
        (prompt,) = text
        if not images:
            return BatchFeature({**self.tokenizer([prompt], return_tensors=return_tensors)})
        media, texts = self._process_images(images[0], **options)
        placeholder = self.tokenizer.convert_tokens_to_ids(IMAGE)
        first, *rest = re.split(r"<\|image_\d+\|>|<\|image\|>", prompt)
        ids = list(self.tokenizer(first)["input_ids"])
        for found, piece in zip(texts, rest, strict=True):
            ids += [placeholder] * (len(found) // len(IMAGE)) + list(self.tokenizer(piece)["input_ids"])
        input_ids = torch.tensor([ids])
        return BatchFeature({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **media})


def load(path: Path) -> Phi3VProcessor:
    """Load the processor of the checkpoint in `path`.

    Raises:
        ModelError: preprocessor_config.json is missing, which says how many tiles an image is cut into.
    """
    settings, seen = read_json(path / CONFIG), read_json(path / _PREPROCESSOR)
    if not seen:
        raise ModelError(f"Phi-3-vision's {_PREPROCESSOR} is missing.", "Fetch the checkpoint again.")
    vision = _TOWER | settings.get("vision_config", {})
    images = Phi3VImageProcessor(seen, vision["image_size"], vision["patch_size"])
    return Phi3VProcessor(images, AutoTokenizer.from_pretrained(str(path), **own_config(settings)))
