"""Mistral 3: an image in rows of merged patches, each row ended by a break token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ProcessError
from beheld.families.inputs import LAID_OUT, FamilyInputs


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call.

    Raises:
        ProcessError: the image makes a single embedding, which transformers' tower misreads as many.
    """
    outputs, texts = processor._process_images([item], **options)
    if texts[0].count(processor.image_token) == 1:
        side = processor.patch_size * processor.spatial_merge_size
        raise ProcessError(
            f"The image fits into one square of {side} pixels, which the model cannot process alone.",
            f"Enlarge it to more than {side} pixels in width or height.",
        )
    return outputs, texts[0]


INPUTS = FamilyInputs(call=call, embedded={"image": LAID_OUT})
