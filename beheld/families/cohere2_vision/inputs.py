"""Command A Vision: a prompt says how an image's tiles lie; their processor's own interface tells the rest."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs
from beheld.inputs.media.effective_size import stretched_over_tiles

INPUTS = FamilyInputs(embedded={"image": LAID_OUT}, looks={"image": stretched_over_tiles})
