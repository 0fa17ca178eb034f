"""Seer's processor: an image, brought to whole merged patches, between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, CLIPImageProcessor, ProcessorMixin

_PATCH, _MERGE = 14, 2


class SeerProcessor(ProcessorMixin):
    """Images and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token = "<image>"
        super().__init__(image_processor, tokenizer)

    def _process_images(self, images: Sequence[Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
        """Patches of all images and their sizes in patches, and the text that stands for each image."""
        patches, sizes, texts = [], [], []
        for image in images:
            side = _PATCH * _MERGE
            width, height = (max(1, round(edge / side)) * side for edge in image.size)
            made = self.image_processor(image.resize((width, height), Image.Resampling.BICUBIC), **options)
            pixels = torch.as_tensor(made["pixel_values"])[0]
            rows, columns = height // _PATCH, width // _PATCH
            grid = pixels.unflatten(2, (columns, _PATCH)).unflatten(1, (rows, _PATCH))
            patches.append(grid.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1))
            sizes.append([rows, columns])
            texts.append("<look>" + self.image_token * (rows * columns // _MERGE**2) + "<end>")
        return {"pixel_values": torch.cat(patches), "image_sizes": torch.tensor(sizes)}, texts

    def __call__(self, text: Sequence[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        """One prompt with its images, a list within a list."""
        media: dict[str, Any] = {}
        (prompt,) = text
        if images:
            media, texts = self._process_images(images[0], return_tensors=return_tensors)
            first, *rest = prompt.split(self.image_token)
            prompt = first + "".join(found + part for found, part in zip(texts, rest, strict=True))
        return BatchFeature({**self.tokenizer([prompt], return_tensors=return_tensors), **media})


def load(path: Path) -> SeerProcessor:
    """The processor of the checkpoint in `path`."""
    return SeerProcessor(CLIPImageProcessor.from_pretrained(str(path)), AutoTokenizer.from_pretrained(str(path)))
