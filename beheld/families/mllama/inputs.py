"""Llama 3.2 Vision: an image is one token; the BOS token follows leading images."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.families.inputs import PLAIN_HOST_ONLY, PLAIN_LAYOUT, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import numbers, unenlarged_over_tiles

_IMAGE = "<|image|>"
_START = "<|begin_of_text|>"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Insert the BOS token, if missing, after the leading images."""
    if _START in text:
        return text
    first = 0
    while text.startswith(_IMAGE, first):
        first += len(_IMAGE)
    return text[:first] + _START + text[first:]


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks.

    Its grid's shape is given as an index, counting from 1 all (rows, columns) within the largest number of tiles,
    ordered by rows.
    """
    most = item.setting("max_image_tiles")
    if not isinstance(most, int):
        return None
    grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    rows, columns = grids[numbers(item.outputs["aspect_ratio_ids"])[0] - 1]
    return unenlarged_over_tiles(item, (columns, rows), rows * columns)


INPUTS = FamilyInputs(
    rewrite=rewrite,
    layout=PLAIN_LAYOUT | {"num_tiles"},
    host_only=PLAIN_HOST_ONLY | {"num_tiles"},
    looks={"image": look},
)
