"""SmolVLM: images in rows and columns of tiles; a video is its frames as images, each with its time in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import LAID_OUT, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import under_mask


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or video; see families.inputs.Call."""
    if modality == "image":
        outputs, texts = processor._process_images([[item]], **options)
    else:
        outputs, texts = processor._process_videos([item], **options)
    return outputs, texts[0]


def look_at_frames(item: ProcessedItem) -> EffectiveSize | None:
    """Return the effective size of a video's frames, all equal; see FamilyInputs.looks."""
    frames, _, height, width = item.outputs["pixel_values"].shape[1:]
    mask = item.outputs.get("pixel_attention_mask")
    if mask is not None:
        width, height = under_mask(mask[0, 0])
    return EffectiveSize(width, height, frames=frames)


INPUTS = FamilyInputs(
    places={"video": "<video>"},
    call=call,
    embedded={"image": LAID_OUT, "video": LAID_OUT},
    looks={"video": look_at_frames},
)
