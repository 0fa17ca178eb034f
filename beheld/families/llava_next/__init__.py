"""LLaVA-NeXT: LLaVA with images in tiles."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("llava_next",),
    tested=(
        KnownCheckpoint(
            "llava_next", "LlavaNextForConditionalGeneration", "llava-hf/llava-v1.6-mistral-7b-hf", IMAGE, "tiles"
        ),
    ),
)
