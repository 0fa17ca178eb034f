"""LFM2-VL: an image in rows and columns of tiles between delimiters, which a processor option removes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ProcessError
from beheld.families.inputs import LAID_OUT, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import numbers


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call.

    Raises:
        ProcessError: the image is so narrow that it has more patches than a tile can hold.
    """
    # Older versions of the processor lack the attribute; the option is then on.
    marks = getattr(processor, "use_image_special_tokens", True)
    outputs, texts = processor._process_images([[item]], use_image_special_tokens=marks, **options)
    room = outputs["pixel_attention_mask"].shape[-1]
    if any(height * width > room for height, width in outputs["spatial_shapes"].tolist()):
        raise ProcessError(
            f"The image is so narrow that it has more than the {room} patches that a tile can hold.",
            "Cut it into wider or taller parts.",
        )
    return outputs, texts[0]


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks."""
    outputs = item.outputs
    patch = item.edge("encoder_patch_size")
    if patch is None or "image_rows" not in outputs:
        return None
    (rows,), (columns,) = numbers(outputs["image_rows"]), numbers(outputs["image_cols"])
    height, width = (patch * number for number in numbers(outputs["spatial_shapes"])[:2])
    tiles = len(outputs["spatial_shapes"])
    step = width if tiles > 1 else patch * (item.edge("downsample_factor") or 1)
    return EffectiveSize(columns * width, rows * height, tiles, step=step)


INPUTS = FamilyInputs(call=call, embedded={"image": LAID_OUT}, looks={"image": look})
