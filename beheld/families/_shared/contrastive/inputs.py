"""A prompt is a text, or an image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.core.errors import PromptError
from beheld.families._shared.contrastive.config import placeholders
from beheld.families.inputs import FamilyInputs, ItemPlace

_IMAGE = "<image>"


def rewrite(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return a text as it is, and of an image its place alone.

    Raises:
        PromptError: both are given.
    """
    if not counts.get("image"):
        return text
    if text.strip() not in ("", _IMAGE):
        raise PromptError(
            "This model gives a vector of a text or of an image, and none of both together.",
            "Send the text and the image as two prompts.",
        )
    return (ItemPlace("image"),)


def load(path: Path) -> Any:
    """Load the processor of a checkpoint, and note the id of an image's place, for which its tokenizer has no token."""
    from transformers import AutoConfig, AutoProcessor

    processor = AutoProcessor.from_pretrained(str(path))
    processor.image_place = placeholders(AutoConfig.from_pretrained(str(path)))["image"]
    return processor


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """Run the processor on an image; see families.inputs.Call."""
    return processor.image_processor([item], **options), (processor.image_place,)


INPUTS = FamilyInputs(
    template="_shared/plain.jinja",
    rewrite=rewrite,
    rewrite_chat=rewrite,
    call=call,
    load=load,
    placeholders={"image": _IMAGE},
    embedded={"image": "the model makes nothing of an image but its vector"},
    most={"image": 1},
    closes="the model gives vectors, and no answer",
)
