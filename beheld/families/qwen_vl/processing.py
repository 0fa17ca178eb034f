"""Qwen-VL's tokenizer, made of qwen.tiktoken, and its processor: an image becomes a square.

An image stands between `<img>` and `</img>` in a prompt. The published code writes its path there as bytes and fills up
with `<imgpad>`; here there are as many `<imgpad>` as embeddings, which replace either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError
from beheld.families._shared import tiktoken_file

IMAGE, START, END = "<imgpad>", "<img>", "</img>"
FILE = "qwen.tiktoken"
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EOS = "<|endoftext|>"
_SPECIAL = (_EOS, "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
# What names and places objects in an answer belongs to its text: the published code's chat() returns it.
_BOXES = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
_IMAGES = (START, END, IMAGE)
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of the checkpoint in `path`; None if its files are in transformers' layout.

    Raises:
        ModelError: the file is missing or damaged, or does not fit config.json.
    """
    if (path / "tokenizer.json").is_file():
        return None
    from tokenizers import AddedToken, normalizers
    from transformers import PreTrainedTokenizerFast

    made = tiktoken_file.read(path / FILE, _SPLIT)
    made.normalizer = normalizers.NFC()
    added = [(token, token not in _BOXES) for token in (*_SPECIAL, *_BOXES, *_IMAGES)]
    made.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in added])
    visual = read_json(path / CONFIG).get("visual") or {}
    start, expected = made.token_to_id(START), visual.get("image_start_id")
    if expected is not None and start != expected:
        raise ModelError(
            f"{FILE} gives {START} the id {start}, but visual.image_start_id in config.json is {expected}.",
            "Fetch the checkpoint again: the two files belong together.",
        )
    settings = read_json(path / "tokenizer_config.json")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=_EOS,
        pad_token=_EOS,
        chat_template=settings.get("chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=settings.get("model_max_length", 8192),
    )


class QwenVLOptions(TypedDict, total=False):
    """The options of one call: there are none."""


class QwenVLImageProcessor(ImageProcessingMixin):
    """Makes the tower's input of images.

    Args:
        side: of the square, in pixels.
        num_embeds: embeddings of an image.
    """

    valid_kwargs: Any = QwenVLOptions
    model_input_names = ("pixel_values",)

    def __init__(self, side: int, num_embeds: int) -> None:
        self.size = {"height": side, "width": side}
        self.num_embeds = num_embeds
        super().__init__()

    def __call__(self, images: Sequence[Any], **options: Any) -> dict[str, Tensor]:
        """Return `pixel_values` (images, 3, side, side)."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (_MEAN, _STD))
        side = self.size["height"]
        pixels = [image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC) for image in images]
        tensors = [torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32).div(255) for image in pixels]
        return {"pixel_values": torch.stack([(tensor - mean) / std for tensor in tensors])}


class QwenVLProcessor(ProcessorMixin):
    """Images and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token = IMAGE
        super().__init__(image_processor, tokenizer)

    def _process_images(self, images: Any, **options: Any) -> tuple[dict[str, Tensor], list[str]]:
        options.pop("return_tensors", None)
        media = self.image_processor(images, **options)
        return media, [IMAGE * self.image_processor.num_embeds] * len(media["pixel_values"])

    def __call__(self, text: Sequence[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        """Prepare one prompt with its images, a list within a list."""
        (prompt,) = text
        media, texts = self._process_images(images[0], **options) if images else ({}, [])
        first, *rest = re.split(f"{START}(?:{IMAGE})?{END}", prompt)
        whole = first + "".join(f"{START}{found}{END}{piece}" for found, piece in zip(texts, rest, strict=True))
        return BatchFeature({**self.tokenizer([whole], return_tensors=return_tensors), **media})


def load(path: Path) -> QwenVLProcessor:
    """Load the processor of the checkpoint in `path`."""
    from beheld.families.qwen_vl.config import QwenVLConfig

    config = QwenVLConfig.from_dict(read_json(path / CONFIG))
    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path))
    return QwenVLProcessor(QwenVLImageProcessor(config.vision_config.image_size, config.num_queries), tokenizer)
