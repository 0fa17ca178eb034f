"""Llama 3.2 Vision: an image is one token; the start of the text stands behind the images that come first."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.families.inputs import PLAIN_HOST_ONLY, PLAIN_LAYOUT, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import numbers, unenlarged_over_tiles

_IMAGE = "<|image|>"
_START = "<|begin_of_text|>"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the start of the text, where it is missing, behind the images that stand first."""
    if _START in text:
        return text
    first = 0
    while text.startswith(_IMAGE, first):
        first += len(_IMAGE)
    return text[:first] + _START + text[first:]


def look(item: ProcessedItem) -> EffectiveSize | None:
    """How large the image stands before the tower; see FamilyInputs.looks.

    The shape of its grid is given by a number, which counts from 1 all (rows, columns) that have no more tiles than
    there may be, by rows.
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
