"""Gemma 3: `<start_of_image>` becomes a block of embeddings between blank lines; crops are introduced in words."""

from __future__ import annotations

from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks.

    The whole image comes first, then its crops, if any, along its longer side.
    """
    count, _, height, width = item.outputs["pixel_values"].shape
    if count == 1:
        return EffectiveSize(width, height)
    given = item.size
    crops = (count - 1, 1) if given[0] >= given[1] else (1, count - 1)
    return EffectiveSize(crops[0] * width, crops[1] * height, count)


INPUTS = FamilyInputs(
    places={"image": "<start_of_image>"},
    embedded={"image": ("\n\n<start_of_image>", "<end_of_image>\n\n")},
    looks={"image": look},
)
