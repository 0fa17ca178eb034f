"""Llama 4: `<|image|>` in a prompt becomes tiles with separators, whose embeddings take another token's places."""

from __future__ import annotations

from beheld.inputs.families import LAID_OUT, Family
from beheld.inputs.media.effective_size import Seen, Sight, numbers, padded_over_tiles, unenlarged_over_tiles


def look(sight: Sight) -> Seen | None:
    """How large the picture stands before the tower; see Family.looks."""
    rows, columns = numbers(sight.outputs["aspect_ratios"])
    tiles, _, height, width = sight.outputs["pixel_values"].shape
    if sight.setting("resize_to_max_canvas"):
        return padded_over_tiles(sight, (columns * width, rows * height), tiles)
    return unenlarged_over_tiles(sight, (columns, rows), tiles)


FAMILY = Family(places={"image": "<|image|>"}, embedded={"image": LAID_OUT}, looks={"image": look})
