"""LLaVA-1.5: images before a language model."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("llava",),
    tested=(
        KnownCheckpoint(
            "llava",
            "LlavaForConditionalGeneration",
            "llava-hf/llava-1.5-7b-hf",
            IMAGE,
            on_gpu=True,
        ),
    ),
)
