"""Prompts of encoder-decoders that read an image: a prompt is what the decoder continues, after its first token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from beheld.families.inputs import FamilyInputs


def pixels(images: Any, item: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pixels of an image, of most families all that the encoder takes."""
    return {"pixel_values": images([item], **{**options, "return_tensors": "pt"})["pixel_values"]}


def seen(
    start: str,
    features: Callable[[Any, Any, Mapping[str, Any]], Mapping[str, Any]],
    states: Callable[[Mapping[str, Any], Path], int] | None,
) -> FamilyInputs:
    """Return the inputs of a family.

    Args:
        start: the token that starts every answer, which the image belongs to.
        features: (image processor, image, its options) -> what the encoder takes.
        states: see FamilyInputs.
    """

    def call(
        processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
    ) -> tuple[Mapping[str, Any], tuple[int, ...]]:
        return features(processor.image_processor, item, options), (processor.tokenizer.convert_tokens_to_ids(start),)

    def rewrite(text: str, counts: Mapping[str, int]) -> str:
        # Without an image there is nothing to answer about, which is said later.
        return text if start in text or not counts.get("image") else start + text

    return FamilyInputs(
        placeholders={"image": start},
        template="_shared/plain.jinja",
        call=call,
        rewrite=rewrite,
        rewrite_chat=rewrite,
        rewritten_ends="written",
        most={"image": 1},
        states=states,
        closes="its decoder starts a new answer",
    )
