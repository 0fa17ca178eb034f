"""GLM-4V-9B's tokenizer, of a tiktoken vocabulary, and its processor: an image becomes a square.

Both follow the repository's tokenization_chatglm.py, which also holds the numbers for images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError
from beheld.families._shared import tiktoken_file

PLACE = BEGIN, IMAGE, END = "<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>"
# What the tokenizer puts before every text.
FIRST = ("[gMASK]", "<sop>")
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_VOCABULARY = "tokenizer.model"
_REMEDY = "Fetch the checkpoint again: tokenizer.model and tokenizer_config.json belong together."


def read(path: Path) -> Any:
    """Return the tokenizer of the checkpoint in `path`; None if its class is another.

    Raises:
        ModelError: a file is missing, or they contradict each other.
    """
    settings = read_json(path / "tokenizer_config.json")
    if settings.get("tokenizer_class") != "ChatGLM4Tokenizer":
        return None
    from tokenizers import AddedToken, processors

    made = tiktoken_file.read(path / _VOCABULARY)
    named = {int(index): entry for index, entry in (settings.get("added_tokens_decoder") or {}).items()}
    for index, entry in sorted(named.items()):
        made.add_special_tokens([AddedToken(entry["content"], normalized=False, special=entry.get("special", True))])
        if made.token_to_id(entry["content"]) != index:
            raise ModelError(
                f"GLM-4V's tokenizer gives {entry['content']!r} the id {made.token_to_id(entry['content'])}, not "
                f"{index}.",
                _REMEDY,
            )
    missing = [token for token in (*FIRST, *PLACE) if made.token_to_id(token) is None]
    if missing:
        raise ModelError(f"The tokenizer has no token {missing[0]!r}.", _REMEDY)
    made.post_processor = processors.TemplateProcessing(
        single=[*FIRST, "$A"], special_tokens=[(token, made.token_to_id(token)) for token in FIRST]
    )
    ends = {name: settings[name] for name in ("eos_token", "pad_token") if settings.get(name)}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=settings.get("chat_template"),
        clean_up_tokenization_spaces=False,
        additional_special_tokens=settings.get("additional_special_tokens") or [],
        model_max_length=settings.get("model_max_length"),
        padding_side="left",
        **ends,
    )


class GLM4VOptions(TypedDict, total=False):
    """The options of one call: none."""


class GLM4VImageProcessor(ImageProcessingMixin):
    """Makes the tower's input of images.

    Attributes:
        side: of an image in pixels.
        num_patches: the number of embeddings between those of an image's beginning and end.
    """

    valid_kwargs: Any = GLM4VOptions
    model_input_names = ("pixel_values",)

    def __init__(self, side: int, num_patches: int) -> None:
        self.side = side
        self.num_patches = num_patches
        super().__init__()

    def __call__(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """Return the pixels (images, 3, side, side)."""
        mean, std = (torch.tensor(value)[:, None, None] for value in (_MEAN, _STD))
        return {"pixel_values": torch.stack([(self._square(image) - mean) / std for image in images])}

    def _square(self, image: Any) -> Tensor:
        resized = image.convert("RGB").resize((self.side, self.side), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1).to(torch.float32).div(255)


class GLM4VProcessor(ProcessorMixin):
    """Images and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        self.image_token = IMAGE
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def _process_images(self, images: Any, **options: Any) -> tuple[dict[str, Tensor], list[str]]:
        text = BEGIN + IMAGE * self.image_processor.num_patches + END
        return self.image_processor(images), [text] * len(images)

    def __call__(self, text: Sequence[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        """Prepare one prompt with its images, a list within a list."""
        prompt = text[0]
        media, texts = self._process_images(images[0]) if images and images[0] else ({}, [])
        for own in texts:
            # What is replaced no longer matches.
            prompt = prompt.replace("".join(PLACE), own, 1)
        made = self.tokenizer([prompt], return_tensors=return_tensors)
        return BatchFeature({"input_ids": made["input_ids"], "attention_mask": made["attention_mask"], **media})


def load(path: Path) -> GLM4VProcessor:
    """Load the processor of the checkpoint in `path`."""
    given = own_config(read_json(path / CONFIG))
    tokenizer = read(path) or AutoTokenizer.from_pretrained(str(path), **given)
    vision = given["config"].vision_config
    return GLM4VProcessor(
        GLM4VImageProcessor(vision.image_size, vision.num_embeds - 2), tokenizer, tokenizer.chat_template
    )
