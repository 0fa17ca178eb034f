"""LightOnOCR: an image is its merged patches, row by row, without breaks."""

from __future__ import annotations

from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem


def look(item: ProcessedItem) -> EffectiveSize | None:
    """How large the image stands before the tower; see FamilyInputs.looks.

    Its image processor rounds sides to whole patches of its own, which may be merged ones already.
    """
    height, width = item.outputs["pixel_values"].shape[-2:]
    return EffectiveSize(width, height, step=item.edge("patch_size") or 0)


INPUTS = FamilyInputs(looks={"image": look})
