"""Qwen3-Omni: as Qwen2.5-Omni with other markers; its sounds are not padded at all, hence each has its own features."""

from __future__ import annotations

from dataclasses import replace

from beheld.inputs.families import qwen3_vl, qwen_omni

FAMILY = replace(
    qwen_omni.FAMILY,
    markers={
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    },
    embedded=qwen3_vl.FAMILY.embedded,
)
