"""Phi-3-vision: prompts number images, for example `<|image_1|>`; the text around them is encoded piece by piece."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.core.errors import PromptError
from beheld.families.inputs import EffectiveSize, FamilyInputs, ItemPlace, ProcessedItem
from beheld.inputs.media.effective_size import numbers, padded_over_tiles

IMAGE = "<|image|>"
_NUMBERED = re.compile(r"<\|image_(\d+)\|>")


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.phi3_v.processing import load as load_own

    return load_own(path)


def rewrite(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a text with numbered images, empty ones included; other text is unchanged.

    Raises:
        PromptError: the numbers are not 1, 2, ... in this order.
    """
    # The odd entries are the numbers.
    first, *rest = _NUMBERED.split(text)
    if not rest:
        return _pieces(text.split(IMAGE)) if counts.get("image") and IMAGE in text else text
    if IMAGE in text:
        raise PromptError(f"The prompt has both {IMAGE} and numbered images.", "Write <|image_1|>, then <|image_2|>.")
    if rest[::2] != [str(number) for number in range(1, 1 + len(rest) // 2)]:
        raise PromptError("The images' numbers are not 1, 2, ... in order.", "Write <|image_1|>, then <|image_2|>.")
    return _pieces([first, *rest[1::2]])


def rewrite_chat(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a rendered conversation; templates mark images by the token or by numbers.

    Numbers are read only where there are images and no token marks them, so that they are text elsewhere.
    """
    if not counts.get("image"):
        return text
    return _pieces(text.split(IMAGE)) if IMAGE in text else rewrite(text, counts)


def _pieces(texts: list[str]) -> tuple[str | ItemPlace, ...]:
    pieces: list[str | ItemPlace] = [texts[0]]
    for text in texts[1:]:
        pieces += [ItemPlace("image"), text]
    # The repository's code gives even an empty text its special tokens, also one after the last image.
    return tuple(pieces)


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return an image's effective size on its canvas of tiles; see FamilyInputs.looks."""
    height, width = numbers(item.outputs["image_sizes"])
    return padded_over_tiles(item, (width, height), item.outputs["pixel_values"].shape[0])


INPUTS = FamilyInputs(
    load=load,
    placeholders={"image": IMAGE},
    rewrite=rewrite,
    rewrite_chat=rewrite_chat,
    rewritten_ends="each piece",
    looks={"image": look},
)
