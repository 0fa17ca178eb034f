"""The effective size of images in InternVL's original layout."""

from __future__ import annotations

from beheld.families.inputs import EffectiveSize, ProcessedItem


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the size of an image that was stretched over its grid; see FamilyInputs.looks."""
    count, _, height, width = item.outputs["pixel_values"].shape
    columns, rows = item.part.grid(item.size, item.arguments)
    is_chosen = item.part.bounds(item.arguments)[1] > 1
    return EffectiveSize(columns * width, rows * height, count, step=width if is_chosen else 0)
