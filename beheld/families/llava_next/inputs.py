"""LLaVA-NeXT: LLaVA's prompts, with images resized to the best of several canvases and cut into tiles.

A lone image has as many tiles as its shape needs. Its features keep that form, (1, tiles, 3, height, width): padding
belongs to a batch, not to an image.
"""

from __future__ import annotations

from beheld.families.inputs import EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import best_canvas, padded_over_tiles


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks."""
    tiles = item.outputs["pixel_values"].shape[1]
    return padded_over_tiles(item, best_canvas(item, item.setting("image_grid_pinpoints")), tiles)


INPUTS = FamilyInputs(template="llava/chat_template.jinja", looks={"image": look})
