"""Pixtral: LLaVA's model; images at their native size, in rows."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("llava",),
    tested=(
        KnownCheckpoint(
            "pixtral_hf",
            "LlavaForConditionalGeneration",
            "mistral-community/pixtral-12b",
            IMAGE,
            "images at their native size",
        ),
    ),
    processors=("PixtralProcessor",),
    calls=("mistral",),
)
