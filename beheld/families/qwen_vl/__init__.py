"""Qwen-VL, which shares Qwen-1's model type."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("qwen",),
    architectures=("QwenVLForConditionalGeneration",),
    undefined=Undefined(
        "QwenVLForConditionalGeneration", "Qwen/Qwen-VL", "Qwen-1, a ViT-bigG tower and its resampler", entry="visual"
    ),
)
