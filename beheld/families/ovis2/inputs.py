"""Ovis 2: `<image>` becomes marked tiles, whose embeddings replace another token."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs
from beheld.inputs.media.effective_size import stretched_over_tiles

INPUTS = FamilyInputs(
    places={"image": "<image>"},
    embedded={"image": LAID_OUT},
    looks={"image": stretched_over_tiles},
)
