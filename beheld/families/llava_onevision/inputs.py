"""LLaVA-OneVision: an image is cut into tiles only if it is the only one of its prompt.

The processor derives a prompt's number of images from the nesting of its input. An image that is not alone is therefore
processed together with a one-pixel dummy, whose part of the result is dropped, so its features do not depend on the
other images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import WITH_OTHERS, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import best_canvas, fitted, padded_over_tiles


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or video; see families.inputs.Call."""
    if modality == "video":
        outputs, texts = processor._process_videos([item], **options)
        return outputs, texts[0]
    if setting != WITH_OTHERS:
        outputs, texts = processor._process_images([item], **options)
        return outputs, texts[0]
    from PIL import Image

    stand_in = Image.new("RGB", (1, 1))
    outputs, texts = processor._process_images([[item, stand_in]], **options)
    own = {name: value[:1] for name, value in outputs.items() if name != "batch_num_images"}
    return {**own, "batch_num_images": outputs["batch_num_images"]}, texts[0]


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks."""
    _, tiles, _, height, width = item.outputs["pixel_values"].shape
    if tiles == 1:
        # With other images: padded to a square.
        return EffectiveSize(*fitted(item.size, (width, height)))
    return padded_over_tiles(item, best_canvas(item, item.setting("image_grid_pinpoints")), tiles)


INPUTS = FamilyInputs(template="_shared/chatml.jinja", counts=frozenset(("image",)), call=call, looks={"image": look})
