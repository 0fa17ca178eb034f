"""Seer's prompts: an image stands between two marks, as large as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.families.inputs import LAID_OUT, EffectiveSize, FamilyInputs, ProcessedItem


def load(path: Path) -> Any:
    """The processor of the checkpoint in `path`; see FamilyInputs.load."""
    from tests.families.seer.processing import load as load_own

    return load_own(path)


def look(item: ProcessedItem) -> EffectiveSize | None:
    """How large the image stands before the tower; see FamilyInputs.looks."""
    ((rows, columns),) = item.outputs["image_sizes"].tolist()
    return EffectiveSize(14 * columns, 14 * rows, step=28)


INPUTS = FamilyInputs(load=load, places={"image": "<image>"}, embedded={"image": LAID_OUT}, looks={"image": look})
