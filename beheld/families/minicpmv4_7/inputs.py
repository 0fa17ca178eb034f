"""MiniCPM-V 4.7: MiniCPM-V 4.6's prompts, in which videos have no numbers; positions depend on the slices' sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from beheld.families.minicpmv4_6 import inputs as earlier

# Modality -> the processor's sizes of its slices, and their name where positions are computed.
_SIZES = {"image": ("target_sizes", "image_canvas"), "video": ("target_sizes_videos", "video_canvas")}


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or video; see families.inputs.Call."""
    if modality == "video":
        options = {**options, "use_image_id": False}
    outputs, text = earlier.call(processor, modality, item, options, setting)
    sizes, name = _SIZES[modality]
    return {**outputs, name: outputs[sizes].reshape(1, -1)}, text


_CANVAS = frozenset(name for _, name in _SIZES.values())
INPUTS = replace(
    earlier.INPUTS,
    call=call,
    numbered=frozenset(("image",)),
    layout=earlier.INPUTS.layout | _CANVAS,
    host_only=earlier.INPUTS.host_only | _CANVAS,
)
