"""Bee: each `<image>` of a prompt becomes an overview and tiles, whether or not the image is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import best_canvas, padded_over_tiles


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.bee.processing import load as load_own

    return load_own(path)


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks."""
    tiles = item.outputs["pixel_values"].shape[1]
    return padded_over_tiles(item, best_canvas(item, item.setting("image_grid_pinpoints")), tiles)


INPUTS = FamilyInputs(template="_shared/chatml.jinja", load=load, looks={"image": look})
