"""SmolVLM: pictures in rows and columns of tiles; a video is its frames as pictures, each with its time in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.inputs.families import LAID_OUT, Family
from beheld.inputs.media.effective_size import Seen, Sight, under_mask


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one picture or video; see families.Call."""
    if modality == "image":
        outputs, texts = processor._process_images([[item]], **options)
    else:
        outputs, texts = processor._process_videos([item], **options)
    return outputs, texts[0]


def look_at_frames(sight: Sight) -> Seen | None:
    """How large the frames of a video stand before the tower, all of one size; see Family.looks."""
    frames, _, height, width = sight.outputs["pixel_values"].shape[1:]
    mask = sight.outputs.get("pixel_attention_mask")
    if mask is not None:
        width, height = under_mask(mask[0, 0])
    return Seen(width, height, frames=frames)


FAMILY = Family(
    places={"video": "<video>"},
    call=call,
    embedded={"image": LAID_OUT, "video": LAID_OUT},
    looks={"video": look_at_frames},
)
