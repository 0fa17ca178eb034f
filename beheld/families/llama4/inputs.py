"""Llama 4: `<|image|>` becomes tiles with separators, whose embeddings replace another token."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import numbers, padded_over_tiles, unenlarged_over_tiles


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks."""
    rows, columns = numbers(item.outputs["aspect_ratios"])
    tiles, _, height, width = item.outputs["pixel_values"].shape
    if item.setting("resize_to_max_canvas"):
        return padded_over_tiles(item, (columns * width, rows * height), tiles)
    return unenlarged_over_tiles(item, (columns, rows), tiles)


INPUTS = FamilyInputs(places={"image": "<|image|>"}, embedded={"image": LAID_OUT}, looks={"image": look})
