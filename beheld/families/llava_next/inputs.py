"""LLaVA-NeXT: LLaVA's prompts, with images that are fitted into the best of some canvases and cut into tiles.

A lone image has as many tiles as its shape asks for. Its features are kept that way, (1, tiles, 3, height, width):
the padding that a batch would add belongs to the batch, not to the image.
"""

from __future__ import annotations

from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import best_canvas, padded_over_tiles


def look(item: ProcessedItem) -> EffectiveSize | None:
    """How large the image stands before the tower; see FamilyInputs.looks."""
    tiles = item.outputs["pixel_values"].shape[1]
    return padded_over_tiles(item, best_canvas(item, item.setting("image_grid_pinpoints")), tiles)


INPUTS = FamilyInputs(template="llava/chat_template.jinja", looks={"image": look})
