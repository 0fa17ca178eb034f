"""Aria: an image padded to a square, with a mask of the padding, or cut into such squares."""

from __future__ import annotations

from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import best_canvas, padded_over_tiles, under_mask


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks."""
    masks = item.outputs["pixel_mask"]
    if not item.setting("split_image"):
        return EffectiveSize(*under_mask(masks[0]))
    return padded_over_tiles(item, best_canvas(item, item.setting("split_resolutions")), len(masks))


INPUTS = FamilyInputs(looks={"image": look})
