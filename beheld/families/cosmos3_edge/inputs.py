"""Cosmos 3 Edge: a video is its frames with their times, each between delimiters of its own."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

_START, _END = "<|vision_start|>", "<|vision_end|>"

INPUTS = FamilyInputs(
    placeholders={"image": f"{_START}<|image_pad|>{_END}", "video": f"{_START}<|video_pad|>{_END}"},
    places={"video": (_START, "<|video_pad|>", _END)},
    embedded={"video": LAID_OUT},
)
