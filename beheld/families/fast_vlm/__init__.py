"""FastVLM: a convolutional tower before Qwen2."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("fast_vlm",),
    tested=(
        KnownCheckpoint(
            "fast_vlm",
            "FastVlmForConditionalGeneration",
            "KamilaMila/FastVLM-7B",
            IMAGE,
            "a convolutional tower, Qwen2 text",
            by_census=True,
        ),
    ),
)
