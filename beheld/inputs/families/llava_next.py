"""LLaVA-NeXT: LLaVA's prompts, with pictures that are fitted into the best of some canvases and cut into tiles.

A lone picture has as many tiles as its shape asks for. Its features are kept that way, (1, tiles, 3, height, width):
the padding that a batch would add belongs to the batch, not to the picture.
"""

from __future__ import annotations

from beheld.inputs.families import Family
from beheld.inputs.media.effective_size import Seen, Sight, best_canvas, padded_over_tiles


def look(sight: Sight) -> Seen | None:
    """How large the picture stands before the tower; see Family.looks."""
    tiles = sight.outputs["pixel_values"].shape[1]
    return padded_over_tiles(sight, best_canvas(sight, sight.setting("image_grid_pinpoints")), tiles)


FAMILY = Family(template="llava", looks={"image": look})
