"""Qianfan-OCR: `<image>` becomes tiles, whose embeddings replace another token."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs
from beheld.inputs.media.effective_size import stretched_over_tiles

INPUTS = FamilyInputs(
    places={"image": "<image>"},
    embedded={"image": ("<img>", "</img>")},
    looks={"image": stretched_over_tiles},
)
