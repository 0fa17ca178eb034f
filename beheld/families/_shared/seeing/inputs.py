"""Prompts of decoders after an encoder that reads one item: what is written continues the prompt's words, if any.

The decoder's first token, to which the item belongs, is known by its id, which not every tokenizer can write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.families.inputs import FamilyInputs, ItemPlace

# (processor, the item, keyword arguments of the sub-processor) -> what the encoder takes.
Run = Callable[[Any, Any, Mapping[str, Any]], Mapping[str, Any]]


def pixels(processor: Any, item: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run the image processor; see Run."""
    return {"pixel_values": processor.image_processor([item], **options)["pixel_values"]}


def seen(first: Callable[[Path], int], modality: str = "image", run: Run = pixels, **facts: Any) -> FamilyInputs:
    """Return the inputs of a family.

    Args:
        first: reads the decoder's first token from the checkpoint's folder.
        modality: what the encoder reads.
        run: makes what it takes.
        facts: further fields of FamilyInputs.
    """

    def rewrite(text: str, counts: Mapping[str, int]) -> tuple[str | ItemPlace, ...]:
        """Put the decoder's first token before the words."""
        return ItemPlace(modality), text

    def variant(folder: Path) -> FamilyInputs:
        token = first(folder)

        def call(
            processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
        ) -> tuple[Mapping[str, Any], tuple[int, ...]]:
            return run(processor, item, options), (token,)

        return replace(made, call=call)

    made = FamilyInputs(
        template="_shared/plain.jinja",
        variant=variant,
        rewrite=rewrite,
        rewrite_chat=rewrite,
        most={modality: 1},
        closes="its decoder continues the words of a prompt",
        **facts,
    )
    return made
