"""dots.ocr: an image between a start and an end token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.families.inputs import FamilyInputs


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.dots_ocr.processing import load as load_own

    return load_own(path)


INPUTS = FamilyInputs(load=load, placeholders={"image": "<|img|><|imgpad|><|endofimg|>"})
