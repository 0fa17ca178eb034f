"""InternVL: a video is its frames as images, numbered in words; the tower accepts only images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import LAID_OUT, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import stretched_over_tiles


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or video; see families.inputs.Call."""
    if modality == "image":
        outputs, texts = processor._process_images([item], **options)
        return outputs, texts[0]
    outputs, texts = processor._process_videos([item], **options)
    frames = outputs["pixel_values_videos"].flatten(0, 1)
    return {"pixel_values": frames}, texts[0]


def look_at_frames(item: ProcessedItem) -> EffectiveSize | None:
    """Return the effective size of a video's frames; see FamilyInputs.looks."""
    frames, _, height, width = item.outputs["pixel_values"].shape
    return EffectiveSize(width, height, frames=frames)


INPUTS = FamilyInputs(
    places={"video": "<video>"},
    call=call,
    embedded={"image": ("<img>", "</img>"), "video": LAID_OUT},
    looks={"image": stretched_over_tiles, "video": look_at_frames},
)
