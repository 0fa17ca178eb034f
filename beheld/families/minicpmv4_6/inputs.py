"""MiniCPM-V 4.6: an image's number, an overview and slices; a video is its frames, each with slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import LAID_OUT, FamilyInputs


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or video, whose number from 1 is `setting`; see families.inputs.Call."""
    options = dict(options)
    numbers = options.pop("use_image_id", None)
    process = processor._process_images if modality == "image" else processor._process_videos
    outputs, (text,) = process([item], **options)
    if processor.default_use_image_id if numbers is None else numbers:
        text = f"{processor.image_id_start_token}{int(setting) - 1}{processor.image_id_end_token}{text}"
    return {name: outputs[name] for name in outputs if name.startswith(("pixel_values", "target_sizes"))}, text


INPUTS = FamilyInputs(
    call=call,
    numbered=frozenset(("image", "video")),
    embedded={"image": LAID_OUT, "video": LAID_OUT},
    unbuilt={"downsample_mode": "Set downsample_mode in config.json and in the processor's files instead."},
)
