"""Qwen2-VL and Qwen2.5-VL: each item between vision delimiters, in the dialogue form of their language model."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs

INPUTS = FamilyInputs(
    placeholders={
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    },
    template="_shared/chatml.jinja",
)
