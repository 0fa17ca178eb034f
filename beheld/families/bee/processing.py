"""Bee's processor: LLaVA-OneVision's for images, which cuts every image into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlavaOnevisionImageProcessor, LlavaOnevisionProcessor

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.families.bee.config import BeeConfig


class BeeProcessor(LlavaOnevisionProcessor):
    """Images and text of a prompt.

    LLaVA-OneVision's processor cuts an image into tiles only if it is the only one in its list. This one treats each
    image of the prompt so.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, **settings: Any) -> None:
        super().__init__(image_processor, tokenizer, **settings)

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(_flat(images), **options)


def _flat(images: Any) -> list[Any]:
    """Return the images of nested lists, in order."""
    if not isinstance(images, Sequence):
        return [images]
    return [image for entry in images for image in _flat(entry)]


def load(path: Path) -> BeeProcessor:
    """Load the processor of the checkpoint in `path`."""
    content = read_json(path / CONFIG)
    config = BeeConfig.from_dict(dict(content))
    vision: Any = config.vision_config
    tokenizer = AutoTokenizer.from_pretrained(str(path), **own_config(content))
    return BeeProcessor(
        LlavaOnevisionImageProcessor.from_pretrained(str(path)),
        tokenizer,
        num_image_tokens=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        vision_aspect_ratio=config.vision_aspect_ratio,
        chat_template=tokenizer.chat_template,
    )
