"""Aria: a picture padded to a square, which only the mask tells from it, or cut into such squares."""

from __future__ import annotations

from beheld.inputs.families import Family
from beheld.inputs.media.effective_size import Seen, Sight, best_canvas, padded_over_tiles, under_mask


def look(sight: Sight) -> Seen | None:
    """How large the picture stands before the tower; see Family.looks."""
    masks = sight.outputs["pixel_mask"]
    if not sight.setting("split_image"):
        return Seen(*under_mask(masks[0]))
    return padded_over_tiles(sight, best_canvas(sight, sight.setting("split_resolutions")), len(masks))


FAMILY = Family(looks={"image": look})
