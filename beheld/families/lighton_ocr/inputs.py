"""LightOnOCR: an image is its merged patches, row by row, without breaks, which embeddings do not say."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

INPUTS = FamilyInputs(embedded={"image": LAID_OUT})
