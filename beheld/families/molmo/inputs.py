"""Molmo: every prompt begins with `<|endoftext|>`, then its images, then its text after a space."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.core.errors import PromptError
from beheld.families.inputs import LAID_OUT, EffectiveSize, FamilyInputs, ItemPlace, ProcessedItem

IMAGE = "<|image|>"
BEGIN = "<|endoftext|>"


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.molmo.processing import load as load_own

    return load_own(path)


def rewrite(text: str, counts: Mapping[str, int]) -> tuple[str | ItemPlace, ...]:
    """Return the beginning, the places of the images, and the text, without the tokens that mark its images.

    Raises:
        PromptError: the text marks another number of images.
    """
    images, marked = counts.get("image", 0), text.count(IMAGE)
    if marked not in (0, images):
        raise PromptError(
            f"The prompt has {IMAGE} {marked} times for {images} images.",
            f"Molmo's images stand before its text: leave out {IMAGE}.",
        )
    plain = text.replace(f"{IMAGE}\n", "").replace(IMAGE, "")
    return (BEGIN, *(ItemPlace("image") for _ in range(images)), f" {plain}")


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the size of the image in its crops; see FamilyInputs.looks."""
    crops, _ = item.outputs["sizes"][0].tolist()
    width, height = item.part.fitted(item.size, item.arguments)
    return EffectiveSize(width, height, crops)


INPUTS = FamilyInputs(
    load=load,
    placeholders={"image": IMAGE},
    places={"image": IMAGE},
    rewrite=rewrite,
    rewrite_chat=rewrite,
    embedded={"image": LAID_OUT},
    looks={"image": look},
)
