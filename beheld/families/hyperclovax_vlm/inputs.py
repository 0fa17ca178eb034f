"""HyperCLOVA X SEED Vision: `<|dummy3|>` stands for an image, `<|_unuse_missing_100270|>` for a video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import best_canvas, padded_over_tiles


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.hyperclovax_vlm.processing import load as load_own

    return load_own(path)


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the effective size of an image; see FamilyInputs.looks."""
    canvas = best_canvas(item, item.part.resolutions)
    return padded_over_tiles(item, canvas, len(item.outputs["pixel_values"]))


def look_at_frames(item: ProcessedItem) -> EffectiveSize | None:
    """Return the effective size of a video's frames, each of which is squeezed into a tile; see FamilyInputs.looks."""
    tile = item.part.tile
    return EffectiveSize(tile, tile, frames=int(item.outputs["video_num_frames"][0]))


INPUTS = FamilyInputs(
    load=load,
    looks={"image": look, "video": look_at_frames},
    host_only=frozenset(("video_num_frames", "video_metadata")),
    described_by=frozenset(("ocr", "lens_keywords", "lens_local_keywords", "filename")),
)
