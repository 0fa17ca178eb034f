"""Command A Vision: the prompt describes an image's tiles; everything else comes from the processor."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs
from beheld.inputs.media.effective_size import stretched_over_tiles

INPUTS = FamilyInputs(embedded={"image": LAID_OUT}, looks={"image": stretched_over_tiles})
