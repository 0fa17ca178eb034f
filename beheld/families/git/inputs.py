"""GIT: the image and the CLS token come before the prompt, which an answer continues; a row of [PAD] is the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.families.inputs import FamilyInputs

_PLACE, _START = "[PAD]", "[CLS]"
_PATCH = 16


def variant(folder: Path) -> FamilyInputs:
    """Return the inputs of the checkpoint in a folder, whose config.json tells the patches' size."""
    patch = read_json(folder / CONFIG).get("vision_config", {}).get("patch_size", _PATCH)

    def call(
        processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
    ) -> tuple[Mapping[str, Any], str]:
        """Run the processor on one image; it has an embedding for each patch, and one for the whole."""
        pixels = processor.image_processor([item], **options)["pixel_values"]
        height, width = pixels[0].shape[-2:]
        return {"pixel_values": pixels}, _PLACE * ((height // patch) * (width // patch) + 1)

    return replace(INPUTS, call=call)


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the image first, unless the prompt places it, and the CLS token before the text."""
    if counts.get("image"):
        return f"{_PLACE}{_START}{text.replace(_PLACE, '', 1)}"
    return _START + text


INPUTS = FamilyInputs(
    template="_shared/plain.jinja",
    variant=variant,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="written",
    most={"image": 1},
)
