"""SmolVLM: pictures in rows and columns of tiles; a video is its frames as pictures, each with its time in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.inputs.families import LAID_OUT, Family


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one picture or video; see families.Call."""
    if modality == "image":
        outputs, texts = processor._process_images([[item]], **options)
    else:
        outputs, texts = processor._process_videos([item], **options)
    return outputs, texts[0]


FAMILY = Family(places={"video": "<video>"}, call=call, embedded={"image": LAID_OUT, "video": LAID_OUT})
