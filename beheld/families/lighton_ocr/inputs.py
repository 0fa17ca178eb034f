"""LightOnOCR: an image is its merged patches, row by row, without row breaks."""

from __future__ import annotations

from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks.

    Its image processor rounds sides to its own patches, which may already be merged ones.
    """
    height, width = item.outputs["pixel_values"].shape[-2:]
    return EffectiveSize(width, height, step=item.edge("patch_size") or 0)


INPUTS = FamilyInputs(looks={"image": look})
